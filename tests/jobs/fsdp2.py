"""FSDP2: parameters live in shards; every layer is gathered for use and its gradients are reduce-scattered."""

import argparse

import _job
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    job = _job.start(min_ranks=2)
    device = job.device
    mesh = init_device_mesh(device.type, (job.world_size,))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)), nn.Linear(64, 10)).to(
        device
    )
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    host = torch.Generator().manual_seed(100 + job.rank)
    for step in range(args.steps):
        x = torch.randn(16, 64, generator=host).to(device)
        y = torch.randint(10, (16,), generator=host).to(device)
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        job.see(loss.item())
        job.progress(step)
    for parameter in model.parameters():
        job.see(parameter.to_local())  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]  (a DTensor)
    job.result()


if __name__ == "__main__":
    main()
