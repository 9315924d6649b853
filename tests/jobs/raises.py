"""One rank raises at a given step of a run that would otherwise go on; the others are left at a collective."""

import argparse

import _job
import torch
import torch.distributed as dist


class DeliberateError(Exception):
    """What the traceback of this job must end with."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--step", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()
    job = _job.start()
    value = torch.ones(64, 64, device=job.device)
    for step in range(args.steps):
        if job.rank == args.rank and step == args.step:
            raise DeliberateError(f"rank {job.rank} raises at step {step}")
        value = (value @ value * 0.01).tanh()
        if dist.is_initialized():
            dist.all_reduce(value)
        job.see(value.sum().item())
        job.progress(step)
    job.result()


if __name__ == "__main__":
    main()
