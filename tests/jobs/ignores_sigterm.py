"""Ignores SIGTERM, SIGHUP and SIGINT and works on; only SIGKILL or the time limit ends it."""

import argparse
import signal
import time

import _job
import torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    job = _job.start()
    value = torch.ones(64, 64, device=job.device)
    end, n = time.monotonic() + args.seconds, 0
    while time.monotonic() < end:
        value = (value @ value * 0.01).tanh()
        value.sum().item()
        if n % 100 == 0:
            job.progress(n)
        n += 1
    job.result()


if __name__ == "__main__":
    main()
