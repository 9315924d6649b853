"""The two sides of a comparison: long-lived processes, native or proxied, that measure windows when they are asked.

A pair of windows then takes a fraction of a second instead of two starts of a script, so that many pairs fit into a
minute. Both sides run the same file, one thread a device, pinned to the same two cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

from benchmarks.harness import BenchmarkError
from benchmarks.proxy.limited import limited_cpu
from benchmarks.runs import environment
from proxy_runtime import build
from proxy_runtime.channel.ring import Ring
from proxy_runtime.device.connection import DeviceProxyClient
from proxy_runtime.device.launcher import Zygote
from proxy_runtime.device.wiring import connect_fabric
from proxy_runtime.shim.spec import contiguous_placement, rank_variables

JOBS = Path(__file__).with_name("jobs")
_DEADLINE_S = 300.0
_CORES = 2


@cache
def runtime_build() -> build.Build:
    """The native build of this tree, made if it is missing."""
    return build.ensure(progress=lambda line: print(line, file=sys.stderr))


def cores() -> set[int]:
    """The cores that every measured process is pinned to."""
    return set(sorted(os.sched_getaffinity(0))[:_CORES])


@dataclass(slots=True)
class Side:
    """Processes that answer requests, one a rank.

    Attributes:
        processes: the ranks.
        others: ids of the processes that work for them.
        log: what they write to standard error.
        proxies: their device proxies.
    """

    processes: list[subprocess.Popen[bytes]]
    log: Path
    others: list[int] = field(default_factory=list)
    proxies: list[DeviceProxyClient] = field(default_factory=list)
    _rest: dict[int, bytes] = field(default_factory=dict)

    def ask(self, operation: str, **fields: Any) -> list[dict[str, Any]]:
        """Sends a request to every rank and returns their answers, in order.

        Raises:
            BenchmarkError: one has ended, or does not answer.
        """
        request = json.dumps({"op": operation, **fields}).encode() + b"\n"
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):  # it has ended: the answer will be missing
                _stream(process.stdin).write(request)
                _stream(process.stdin).flush()
        return [self._answer(process, operation) for process in self.processes]

    def _answer(self, process: subprocess.Popen[bytes], operation: str) -> dict[str, Any]:
        descriptor = _stream(process.stdout).fileno()
        data, until = self._rest.pop(descriptor, b""), time.monotonic() + _DEADLINE_S
        while b"\n" not in data:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            more = os.read(descriptor, 1 << 16) if ready else b""
            if not more:
                last = self.log.read_text(errors="replace").strip().splitlines()[-8:]
                why = "has ended" if ready else "does not answer"
                raise BenchmarkError(f"A measured process {why} ({operation}): " + "\n  ".join(["", *last]))
            data += more
        line, _, self._rest[descriptor] = data.partition(b"\n")
        return json.loads(line)

    def cpu_s(self) -> float:
        """CPU time of all its processes so far, in s."""
        return sum(cpu_s(pid) for pid in self._all())

    def waited_s(self) -> float:
        """How long its processes have waited so far for a core that another had, in s."""
        return sum(_scheduled_s(pid)[1] for pid in self._all())

    def each_on_its_core(self) -> None:
        """Rank and device on a core each (natively: on the first): on one core a rank's time has its device's in it."""
        first, *second = sorted(cores())
        for pid in (p.pid for p in self.processes):
            _pin(pid, {first})
        for pid in self.others:
            _pin(pid, set(second) or {first})

    def slowed(self, share: float) -> contextlib.AbstractContextManager[None]:
        """Meanwhile its devices together have no more than this share of a core.

        Raises:
            BenchmarkError: there is no control group to limit them with.
        """
        return limited_cpu(self.others, share)

    def _all(self) -> list[int]:
        return [*(p.pid for p in self.processes), *self.others]


def _pin(pid: int, to: set[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), to)


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, in s, at the resolution of the scheduler."""
    return _scheduled_s(pid)[0]


def _scheduled_s(pid: int) -> tuple[float, float]:
    """For how long a process has run, and for how long it has waited for a core, in s."""
    ran = waited = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().split()
            ran, waited = ran + int(fields[0]), waited + int(fields[1])
    return ran / 1e9, waited / 1e9


@contextlib.contextmanager
def native(script: str, *arguments: str, scratch: Path, ranks: int = 1, prefix: Sequence[str] = ()) -> Iterator[Side]:
    """A script of `jobs/` on the device without us."""
    with socket.socket() as held:  # for ranks that meet: a free port
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    log = scratch / "native.txt"
    with contextlib.ExitStack() as stack:
        more = [rank_variables(rank, ranks, port=port) for rank in range(ranks)]
        processes = [_start(stack, script, arguments, each, log, prefix) for each in more]
        yield Side(processes, log)


@contextlib.contextmanager
def proxied(
    script: str,
    *arguments: str,
    scratch: Path,
    ranks: int = 1,
    devices: int | None = None,
    prefix: Sequence[str] = (),
    python: Path | None = None,
) -> Iterator[Side]:
    """The same script as ranks of a job, on a device each or on `devices`. `python`: the interpreter of the zygote."""
    made = runtime_build()
    log = scratch / "proxied.txt"
    with contextlib.ExitStack() as stack:
        zygote = stack.enter_context(Zygote.start(made, log=scratch / "zygote.txt", python=python))
        rings = [stack.enter_context(Ring.create(rank, made.id)) for rank in range(ranks)]
        proxies = start_proxies(stack, zygote, rings, scratch, devices)
        processes = []
        for rank, ring in enumerate(rings):
            more = rank_environment(ring, rank, ranks)
            processes.append(_start(stack, script, arguments, more, log, prefix, ring.fd))
        yield Side(processes, log, [proxy.pid for proxy in proxies], proxies)


@contextlib.contextmanager
def rank_of(ring: Ring, script: str, *arguments: str, scratch: Path) -> Iterator[Side]:
    """A script of `jobs/` as the rank of a ring that somebody else serves."""
    log = scratch / "rank.txt"
    with contextlib.ExitStack() as stack:
        yield Side([_start(stack, script, arguments, rank_environment(ring), log, (), ring.fd)], log)


def start_proxies(
    stack: contextlib.ExitStack, zygote: Zygote, rings: Sequence[Ring], scratch: Path, devices: int | None = None
) -> list[DeviceProxyClient]:
    """Warm proxies, one a ring or `devices`, with their rings attached, pinned and running; they end with `stack`."""
    placement = contiguous_placement(len(rings), devices or len(rings))
    proxies: list[DeviceProxyClient] = []
    for _ in set(placement):
        proxies.append(stack.enter_context(zygote.fork(scratch / "proxy.txt", deadline_s=_DEADLINE_S)))
        os.sched_setaffinity(proxies[-1].pid, cores())
    if len(rings) > 1:
        connect_fabric(proxies, placement)
    for rank, (device, ring) in enumerate(zip(placement, rings, strict=True)):
        proxies[device].attach(rank, ring.fd)
    for proxy in proxies:
        proxy.run()
    return proxies


def rank_environment(ring: Ring, rank: int = 0, ranks: int = 1) -> dict[str, str]:
    """What a rank is started with, beside the environment that both sides share."""
    made = runtime_build()
    return rank_variables(rank, ranks) | {
        "PYTHONPATH": str(made.rank_dir),
        "ERGO_CHANNEL": f"{ring.fd}:{made.rank_dir}:cpu",
    }


def _start(
    stack: contextlib.ExitStack,
    script: str,
    arguments: Sequence[str],
    more: Mapping[str, str],
    log: Path,
    prefix: Sequence[str] = (),
    *descriptors: int,
) -> subprocess.Popen[bytes]:
    with log.open("ab") as sink:
        process = subprocess.Popen(
            [*prefix, sys.executable, str(JOBS / script), *arguments],
            env=environment() | dict(more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            pass_fds=descriptors,
            start_new_session=True,
        )
    stack.callback(end, process)
    os.sched_setaffinity(process.pid, cores())
    return process


def end(process: subprocess.Popen[Any]) -> None:
    """It ends with its input; if not, it is made to."""
    with contextlib.suppress(BrokenPipeError):
        _stream(process.stdin).close()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _stream(process.stdout).close()


def _stream(stream: IO[Any] | None) -> IO[Any]:
    assert stream is not None
    return stream
