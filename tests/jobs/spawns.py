"""A script that starts its own ranks by torch.multiprocessing.spawn and trains with DDP in them."""

import argparse
import os

import _job
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def train(rank: int, world_size: int, steps: int, init_method: str, workers: int) -> None:
    """One rank. It meets the others before it has chosen its device, as many scripts do."""
    dist.init_process_group("nccl", init_method=init_method, rank=rank, world_size=world_size)
    assert torch.cuda.device_count() == world_size
    torch.manual_seed(1)
    torch.cuda.set_device(rank)
    job = _job.Job(torch.device("cuda", rank), rank, world_size)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 8)).cuda()
    ddp = DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    torch.manual_seed(2 + rank)
    data = TensorDataset(torch.randn(64, 32), torch.randint(0, 8, (64,)))
    context = "spawn" if workers else None
    loader = DataLoader(
        data, 16, num_workers=workers, pin_memory=True, multiprocessing_context=context, persistent_workers=workers > 0
    )
    step = 0
    while step < steps:
        for x, y in loader:
            noise = torch.randn(x.shape, device="cuda")
            loss = cross_entropy(ddp(x.cuda(non_blocking=True) + 0.1 * noise), y.to(rank))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.see(loss.item())
            step += 1
        job.progress(step)
    job.see(*model.state_dict().values())
    job.result()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--file", action="store_true")
    args = parser.parse_args()
    init_method = f"file://{os.getcwd()}/meeting" if args.file else "tcp://127.0.0.1:29533"
    mp.spawn(train, (args.ranks, args.steps, init_method, args.workers), nprocs=args.ranks)


if __name__ == "__main__":
    main()
