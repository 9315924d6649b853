"""Large copies both ways in flight, with the host's buffer changed right after the copy was asked for."""

import argparse

import _job
import torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--size", type=int, default=4_000_000, help="elements of a buffer, 4 bytes each")
    args = parser.parse_args()
    job = _job.start()
    host = torch.Generator().manual_seed(1 + job.rank)
    sources = [torch.randn(args.size, generator=host) for _ in range(3)]
    target = torch.zeros(args.size, device=job.device)
    landing = torch.empty(args.size)
    for n in range(args.rounds):
        source = sources[n % 3]
        target.copy_(source, non_blocking=False)
        source.mul_(1.01)  # the copy must have taken the old values
        target.mul_(1.5).add_(n)
        other = target.sin()
        strided = (target[::7] + other[::7]).cpu()
        other.copy_(sources[(n + 1) % 3])
        sources[(n + 1) % 3].add_(0.5)
        landing.copy_(other)
        other.zero_()  # the landing buffer must hold what was there before
        job.see(strided, landing[-1000:], landing.sum().item())
        job.progress(n)
    job.see(*sources, target)
    job.result()


if __name__ == "__main__":
    main()
