"""Three ranks or more: overlapping process groups with their own collectives beside DDP over all ranks."""

import argparse

import _job
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.functional import cross_entropy, dropout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--skew", type=float, default=0.004, help="longest delay of a rank, in seconds")
    args = parser.parse_args()
    job = _job.start(min_ranks=3)
    device, rank = job.device, job.rank
    skew = _job.Skew(50 + rank, args.skew)
    host = torch.Generator().manual_seed(100 + rank)
    members = [[0, 1], [1, 2], [0, 2], [1]]
    groups: list[dist.ProcessGroup | None] = []
    for ranks in members:
        group = dist.new_group(ranks)  # every rank takes part in making every group
        groups.append(group if isinstance(group, dist.ProcessGroup) else None)
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)).to(device)
    model = nn.parallel.DistributedDataParallel(
        net,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=0.01,  # pyright: ignore[reportArgumentType]  (several buckets for a small model)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    value = torch.randn(40, 40, generator=host).to(device)

    for epoch in range(args.epochs):
        for _ in range(3):
            x = torch.randn(16, 32, generator=host).to(device)
            y = torch.randint(10, (16,), generator=host).to(device)
            skew()
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            skew()
            optimizer.step()
        job.see(loss.item())  # pyright: ignore[reportPossiblyUnboundVariable]
        for n in range(4):
            for which, (ranks, group) in enumerate(zip(members, groups, strict=True)):
                if rank not in ranks:
                    continue
                mixed = (value @ value.t() * 0.1).sin() * (which + 1)
                dist.all_reduce(mixed, group=group)
                value = value * 0.9 + 0.05 * mixed + dropout(value, 0.3) * 0.01
                skew()
                if n == rank and which % 2 == 0:
                    job.see(value.sum().item())
                if n == 3 and len(ranks) > 1:
                    row = value[0].clone()
                    dist.broadcast(row, src=ranks[1], group=group)
                    value[1] = row
        job.progress(epoch)
    job.see(value, *net.state_dict().values())
    job.result()


if __name__ == "__main__":
    main()
