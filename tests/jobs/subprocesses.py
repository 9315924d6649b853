"""Starts processes while the device works: a long-lived child on pipes, shells from a thread pool, bare forks."""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import _job
import torch

ECHO = "import sys\nfor line in sys.stdin:\n    print(int(line) * 3, flush=True)\n"


def run_shell(n: int) -> int:
    """A short-lived process; its exit code is its answer."""
    return subprocess.run(["sh", "-c", f"sleep 0.0{n % 5}; exit {n % 50}"], check=False).returncode


def fork_once(n: int) -> int:
    """A bare fork that leaves at once, without touching the device."""
    pid = os.fork()
    if pid == 0:
        os._exit(n % 100)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    job = _job.start()
    square = torch.randn(128, 128, generator=torch.Generator().manual_seed(job.rank)).to(job.device) / 11
    value = square
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with ThreadPoolExecutor(2) as pool:
        for n in range(args.rounds):
            shell = pool.submit(run_shell, n)
            for _ in range(20):
                value = (value @ square).tanh()
            child.stdin.write(f"{n}\n")
            child.stdin.flush()
            job.see(int(child.stdout.readline()), fork_once(n), value.sum().item(), shell.result())
            if n % 10 == 0:
                job.progress(n)
    child.stdin.close()
    job.see(child.wait(), value)
    job.result()


if __name__ == "__main__":
    main()
