"""One rank ends early: with an exit code, by os._exit, or by a signal to itself. The others would go on for long."""

import argparse
import os
import signal
import sys

import _job
import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--step", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100_000)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--code", type=int, default=7, help="leave with sys.exit(CODE)")
    how.add_argument("--hard-code", type=int, help="leave with os._exit(CODE): no clean-up of any kind")
    how.add_argument("--signal", help="end by this signal, for example SIGKILL or SIGSEGV")
    args = parser.parse_args()
    job = _job.start()
    value = torch.ones(64, 64, device=job.device)
    for step in range(args.steps):
        if job.rank == args.rank and step == args.step:
            sys.stdout.flush()
            if args.signal:
                os.kill(os.getpid(), signal.Signals[args.signal])
            elif args.hard_code is not None:
                os._exit(args.hard_code)
            sys.exit(args.code)
        value = (value @ value * 0.01).tanh()
        if dist.is_initialized():
            dist.all_reduce(value)
        job.see(value.sum().item())
        job.progress(step)
    job.result()


if __name__ == "__main__":
    main()
