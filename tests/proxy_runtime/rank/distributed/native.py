"""Runs a script natively, one process a rank over gloo: what the proxied run is compared with."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from launcher import RankResult

from proxy_runtime.shim.spec import rank_variables

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
_given = [20_000 + os.getpid() % 10_000]


def free_ports(count: int) -> int:
    """The first of `count` ports, one after another, none of which is in use now or has been given to another."""
    for first in range(_given[-1], 60_000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        _given.append(first + count)
        return first
    raise RuntimeError("no free ports")


def run_native(script: Path, *arguments: str, ranks: int, deadline_s: float = 240.0) -> list[RankResult]:
    """Above two ranks the sums follow our tree (tests/support/tree_gloo.py)."""
    port = free_ports(1)
    wrapper = [str(HERE / "with_tree.py")] if ranks > 2 else []
    processes = []
    try:
        for rank in range(ranks):
            environment = {
                **os.environ,
                **rank_variables(rank, ranks, port=port),
                "PYTHONHASHSEED": "0",
                "TORCH_DISABLE_NATIVE_JIT": "1",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, *wrapper, str(script), *arguments]
            processes.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        outputs = [process.communicate(timeout=deadline_s) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return [RankResult(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]
