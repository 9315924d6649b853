"""An index error that waits on the device behind queued work; the script catches every one of them and counts.

On a CPU the error comes from the call itself, on a device proxy from the next call that waits. A real GPU cannot go on
after such an error (its context is lost), so this job is for proxied and CPU runs.
"""

import argparse
import time

import _job
import torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.03, help="seconds between the call and the wait")
    args = parser.parse_args()
    job = _job.start()
    device = job.device
    host = torch.Generator().manual_seed(3 + job.rank)
    table = torch.randn(10, 4, generator=host).to(device)
    good, bad = torch.tensor([1, 2, 3]).to(device), torch.tensor([1, 2, 99]).to(device)
    square = torch.randn(400, 400, generator=host).to(device) / 30
    job.see(torch.embedding(table, good), (square @ square).tanh().sum().item())  # both calls are known from here on

    errors = 0
    for n in range(args.rounds):
        work = square
        for _ in range(40):
            work = (work @ square).tanh()
        try:
            torch.embedding(table, bad)
            time.sleep(args.pause)
            _job.synchronize(device)
        except (IndexError, RuntimeError):
            errors += 1
        job.see(work.sum().item(), torch.embedding(table, good))  # the device must still work
        job.progress(n)
    if errors != args.rounds:
        raise SystemExit(f"{errors} errors were reported, {args.rounds} expected")
    job.see(errors)
    job.result()


if __name__ == "__main__":
    main()
