"""DDP ranks that are hardly ever at the same place: skewed hosts, and evaluation full of collectives."""

import argparse
import pathlib
import random

import _job
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.functional import cross_entropy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--skew", type=float, default=0.01, help="longest delay of a rank, in seconds")
    parser.add_argument("--hurry", type=pathlib.Path, help="no delays any more once this is there")
    parser.add_argument("--bucket-view", action="store_true")
    args = parser.parse_args()
    job = _job.start(min_ranks=2)
    device, rank, world_size = job.device, job.rank, job.world_size
    delay = _job.Skew(70 + rank, args.skew)
    shapes, host = random.Random(50 + rank), torch.Generator().manual_seed(100 + rank)
    torch.manual_seed(rank)
    net = nn.Sequential(
        nn.Linear(64, 256), nn.LayerNorm(256), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10),
    ).to(device)  # fmt: skip
    model = nn.parallel.DistributedDataParallel(
        net,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=0.1,  # pyright: ignore[reportArgumentType]  (several buckets for a small model)
        gradient_as_bucket_view=args.bucket_view,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def skew() -> None:
        if args.hurry is None or not args.hurry.exists():
            delay()

    def train() -> None:
        model.train()
        for step in range(10):
            x = torch.randn(32, 64, generator=host).to(device)
            y = torch.randint(10, (32,), generator=host).to(device)
            skew()
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            skew()
            loss.backward()
            skew()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 3 == rank % 3:  # ranks wait at different steps
                job.see(loss.item())

    @torch.no_grad()
    def evaluate() -> None:
        model.eval()
        totals = torch.zeros(3, device=device)
        for n in range(20):
            batch = shapes.randint(1, 50)
            out = net(torch.randn(batch, 64, generator=host).to(device))
            totals[0] += out.sum()
            totals[1] += batch
            if n % 5 == 0:
                skew()
            if n % 5 == rank % 5:
                job.see(out.abs().max().item())
            if n % 4 == 3:
                copy = totals.clone()
                dist.all_reduce(copy)
                job.see(copy[0].item())
            if n % 10 == 7:
                gathered = [torch.zeros(3, device=device) for _ in range(world_size)]
                dist.all_gather(gathered, totals)
                totals[2] += gathered[(rank + 1) % world_size][0] * 1e-3
        dist.all_reduce(totals, op=dist.ReduceOp.MAX)
        job.see(totals)

    for epoch in range(args.epochs):
        train()
        evaluate()
        if epoch % 4 == 1:
            box = [{"from": rank, "epoch": epoch}]
            dist.broadcast_object_list(box, src=epoch % world_size)
            job.see(box)
        if epoch % 4 == 2:
            skew()
            dist.barrier()
        if epoch % 4 == 3:
            everyone: list[object] = [None] * world_size
            dist.all_gather_object(everyone, {"rank": rank, "text": "x" * (rank + 1) * 10})
            job.see(everyone)
        job.progress(epoch)
    job.see(*net.state_dict().values(), _job.device_rng_state(device))
    job.result()


if __name__ == "__main__":
    main()
