"""Jobs of real rank processes on a given placement, with what their proxies have counted at the end of training."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy_runtime.channel.ring import Ring
from proxy_runtime.device.client import Zygote, connect_fabric
from proxy_runtime.shim.spec import rank_variables

TRAIN = Path(__file__).with_name("train.py")


@dataclass(frozen=True)
class Outcome:
    """The last line of every rank, and the counters of every proxy while the ranks still held everything."""

    lines: list[str]
    splice: list[dict[str, int]]


def run(
    zygote: Zygote,
    rank_dir: Path,
    directory: Path,
    placement: Sequence[int],
    arguments: Sequence[str],
    *,
    script: Path = TRAIN,
    deadline_s: float = 240.0,
) -> Outcome:
    """Runs `script` on every rank and compares nothing."""
    directory.mkdir(parents=True)
    proxies = [zygote.fork(directory / f"proxy-{i}.log") for i in range(max(placement) + 1)]
    rings: list[Ring] = []
    processes: list[subprocess.Popen[str]] = []
    try:
        connect_fabric(proxies, list(placement))
        for rank in range(len(placement)):
            ring = Ring.create(rank)
            rings.append(ring)
            proxies[placement[rank]].attach(rank, ring.fd)
            processes.append(_launch(rank, len(placement), ring.fd, rank_dir, directory, script, arguments))
        for proxy in proxies:
            proxy.run()
        until = time.monotonic() + deadline_s
        while not all((directory / f"ready-{rank}").exists() for rank in range(len(placement))):
            gone = [p for p in processes if p.poll() is not None]
            assert not gone, gone[0].communicate()
            assert time.monotonic() < until, "the job does not end"
            time.sleep(0.02)
        splice: list[dict[str, Any]] = [proxy.stats().get("splice", {}) for proxy in proxies]
        (directory / "go").touch()
        lines = []
        for process in processes:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            lines.append(out.strip().splitlines()[-1])
        return Outcome(lines, splice)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for proxy in proxies:
            proxy.kill()
        for ring in rings:
            ring.close()


def _launch(
    rank: int, world: int, ring_fd: int, rank_dir: Path, directory: Path, script: Path, arguments: Sequence[str]
) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        **rank_variables(rank, world),
        "PYTHONHASHSEED": "0",
        "TORCH_DISABLE_NATIVE_JIT": "1",
        "OMP_NUM_THREADS": "1",
        "HOLD": "1",
        "PYTHONPATH": str(rank_dir),
        "ERGO_CHANNEL": f"{ring_fd}:{rank_dir}:cpu",
    }
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[ring_fd],
    )
