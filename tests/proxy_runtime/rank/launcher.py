"""Runs a script as ranks of a job whose devices are bare proxies (`device_process.py`)."""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from proxy_runtime.channel.ring import HEADER_BYTES, Ring
from proxy_runtime.shim.spec import rank_variables

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
SHARED = HERE / "shared"  # what every script may import
_PROXY_GONE = 2496


@dataclass(frozen=True, slots=True)
class RankResult:
    """How one rank ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Job:
    """What runs."""

    ranks: list[subprocess.Popen[str]]
    proxies: list[subprocess.Popen[str]]
    rings: list[int]

    def line(self, rank: int = 0) -> str:
        """The next line that a rank prints."""
        stdout = self.ranks[rank].stdout
        assert stdout is not None
        return stdout.readline()

    def tail(self, rank: int = 0) -> int:
        """Bytes that the proxy has executed of a rank's ring."""
        return int(struct.unpack("<Q", os.pread(self.rings[rank], 8, 128))[0])

    def head(self, rank: int = 0) -> int:
        """Bytes that a rank has put into its ring."""
        return int(struct.unpack("<Q", os.pread(self.rings[rank], 8, 64))[0])


@dataclass(slots=True)
class Launcher:
    """Where the build is, and how large rings are.

    Attributes:
        rank_dir: the injected directory.
        device_dir: the folder of ``_ergo_device.so``.
        ring_bytes: size of each rank's ring; small ones make ranks wait for room.
    """

    rank_dir: Path
    device_dir: Path
    ring_bytes: int = 1 << 20
    deadline_s: float = 120.0
    environment: dict[str, str] = field(default_factory=dict)
    proxy_environment: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        script: Path | str,
        *arguments: str,
        ranks: int = 1,
        devices: int | None = None,
        python_path: str = "",
        kill_device_after_output: bool = False,
        meanwhile: Callable[[Job], None] | None = None,
    ) -> list[RankResult]:
        """Runs `script` in every rank until all have ended.

        Args:
            script: a path, or a program for ``python -c``.
            arguments: of the script.
            ranks: how many.
            devices: how many proxies; default one per rank.
            python_path: what the user's own ``PYTHONPATH`` holds.
            kill_device_after_output: kill the proxies when rank 0 prints its first line.
            meanwhile: called when all ranks have been started.
        """
        with self.start(script, *arguments, ranks=ranks, devices=devices, python_path=python_path) as job:
            if kill_device_after_output:
                assert job.ranks[0].stdout is not None
                job.ranks[0].stdout.readline()
                for proxy in job.proxies:
                    proxy.kill()
                    proxy.wait()
                for ring in job.rings:
                    _mark_gone(ring)
            if meanwhile is not None:
                meanwhile(job)
            return self._collect(job.ranks, job.proxies, job.rings)

    @contextmanager
    def start(
        self,
        script: Path | str,
        *arguments: str,
        ranks: int = 1,
        devices: int | None = None,
        python_path: str = "",
        output: Path | None = None,
    ) -> Iterator[Job]:
        """Starts `script` in every rank; whatever still runs at the end of the context is killed.

        Args:
            output: where ranks and proxies write, instead of into pipes and to our own errors.
        """
        devices = ranks if devices is None else devices
        command = [str(script)] if isinstance(script, Path) else ["-c", script]
        with ExitStack() as stack:
            target: Any = subprocess.PIPE if output is None else stack.enter_context(output.open("ab"))
            rings = [self._ring(stack, rank) for rank in range(ranks)]
            proxies = self._start_proxies(stack, rings, devices, None if output is None else target)
            processes = [
                self._start_rank(stack, [*command, *arguments], rank, ranks, rings[rank], python_path, target)
                for rank in range(ranks)
            ]
            for proxy in proxies:  # both have imported torch meanwhile, as in a shim
                assert proxy.stdout is not None
                assert proxy.stdout.readline() == "ready\n", "the device proxy did not start"
            yield Job(processes, proxies, rings)

    def _ring(self, stack: ExitStack, rank: int) -> int:
        return stack.enter_context(Ring.create(rank, ring_bytes=self.ring_bytes)).fd

    def _start_proxies(
        self, stack: ExitStack, rings: list[int], devices: int, errors: Any
    ) -> list[subprocess.Popen[str]]:
        ranks, environment = len(rings), {**os.environ, **self.proxy_environment}
        table = [rank * devices // ranks for rank in range(ranks)]
        segments: dict[tuple[int, int], int] = {}
        board = -1
        if devices > 1:
            size, region = _sizes(self.device_dir)
            board = os.memfd_create("board")
            stack.callback(os.close, board)
            os.ftruncate(board, region * devices)
            for pair in combinations(range(devices), 2):
                segments[pair] = os.memfd_create("segment")
                stack.callback(os.close, segments[pair])
                os.ftruncate(segments[pair], size)
        proxies = []
        for index in range(devices):
            shared = [(b if a == index else a, fd) for (a, b), fd in segments.items() if index in (a, b)]
            mine = [(rank, rings[rank]) for rank in range(ranks) if table[rank] == index]
            spec = {"self": index, "table": table, "rings": mine, "shared": shared, "board": board}
            proxy = subprocess.Popen(
                [sys.executable, str(HERE / "device_process.py"), str(self.device_dir), json.dumps(spec)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                pass_fds=[fd for _, fd in mine] + [fd for _, fd in shared] + [board] * (devices > 1),
            )
            stack.callback(_end, proxy)
            proxies.append(proxy)
        return proxies

    def _start_rank(
        self, stack: ExitStack, command: list[str], rank: int, ranks: int, ring: int, python_path: str, output: Any
    ) -> subprocess.Popen[str]:
        path = ":".join(filter(None, (str(self.rank_dir), python_path, str(SHARED))))
        environment = {
            **os.environ,
            **rank_variables(rank, ranks),
            "PYTHONHASHSEED": "0",
            "TORCH_DISABLE_NATIVE_JIT": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "ERGO_CHANNEL": f"{ring}:{self.rank_dir}:cpu",
            **self.environment,
        }
        process = subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            text=True,
            pass_fds=[ring],
        )
        stack.callback(_end, process)
        return process

    def _collect(
        self, processes: list[subprocess.Popen[str]], proxies: list[subprocess.Popen[str]], rings: list[int]
    ) -> list[RankResult]:
        deadline = time.monotonic() + self.deadline_s
        results = []
        for process in processes:
            while True:
                try:
                    out, err = process.communicate(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    if time.monotonic() > deadline:
                        process.send_signal(signal.SIGABRT)
                        raise
                    if any(proxy.poll() is not None for proxy in proxies):
                        for ring in rings:
                            _mark_gone(ring)
            results.append(RankResult(process.returncode, out, err))
        return results


@cache
def _sizes(device_dir: Path) -> tuple[int, int]:
    """Bytes of a segment between two proxies, and of a proxy's region of the board."""
    program = (
        f"import sys, torch; sys.path.insert(0, {str(device_dir)!r}); import _ergo_device; "
        "print(_ergo_device.shm_segment_bytes(1 << 20), _ergo_device.BOARD_REGION_BYTES)"
    )
    asked = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    size, region = map(int, asked.stdout.split())
    return size, region


def _mark_gone(ring: int) -> None:
    """What the shim does for a proxy that has died."""
    with mmap.mmap(ring, HEADER_BYTES) as header:
        header[_PROXY_GONE : _PROXY_GONE + 4] = struct.pack("<I", 1)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
