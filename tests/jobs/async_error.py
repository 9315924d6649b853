"""An index error that waits on the device behind queued work, for a while; the script catches it and goes on without.

On a CPU the error comes from the call itself, on a device from the next call that waits; a device is lost then.
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
    work = square
    job.see(torch.embedding(table, good), (square @ square).tanh().sum().item())  # both calls are known from here on

    for n in range(args.rounds):
        work = square
        for _ in range(40):
            work = (work @ square).tanh()
        time.sleep(args.pause)
        job.see(work.sum().item(), torch.embedding(table, good))
        job.progress(n)

    try:
        for _ in range(200):
            work = (work @ square).tanh()
        torch.embedding(table, bad)
        for _ in range(args.rounds):  # the error is there, and nobody has asked
            time.sleep(args.pause)
        _job.synchronize(device)
    except (IndexError, RuntimeError) as error:
        job.see("out of range" in str(error))
    else:
        raise SystemExit("no error was reported")
    job.result()


if __name__ == "__main__":
    main()
