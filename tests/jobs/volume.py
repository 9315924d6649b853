"""Writes to its working directory as it goes: what is there at the end must be written exactly once, in order."""

import argparse
import os
from pathlib import Path

import _job
import torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--directory", type=Path, default=Path("volume"))
    args = parser.parse_args()
    job = _job.start()
    directory = args.directory / f"rank{job.rank}"
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    host = torch.Generator().manual_seed(job.rank)
    square = torch.randn(64, 64, generator=host).to(job.device) / 8
    value = square
    with (directory / "open.txt").open("w+") as kept_open:
        for n in range(args.rounds):
            value = (value @ square).tanh() + torch.randn(64, 64, generator=host).to(job.device) * 0.1
            line = f"{n} {float(value.sum().item()).hex()}\n"
            kept_open.write(line)
            if n % 3 == 0:
                kept_open.flush()  # at other times the line is in the process's own buffer
            with (directory / "append.txt").open("a") as appended:
                appended.write(line)
            scratch = directory / f"scratch-{n}"
            scratch.write_text(line)
            if n >= 3:
                (directory / f"scratch-{n - 3}").unlink()  # fails if it was not there
            os.replace(scratch, directory / f"scratch-{n}")
            if n % 10 == 0:
                job.progress(n)
        kept_open.seek(0)
        lines = kept_open.read()
    if (directory / "append.txt").read_text() != lines or lines.count("\n") != args.rounds:
        raise SystemExit("the files do not hold every line once")
    job.see(lines, sorted(entry.name for entry in directory.iterdir()))
    job.result()


if __name__ == "__main__":
    main()
