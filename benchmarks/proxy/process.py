"""`proxy.start`: what the device adds to the start of a script. `proxy.rank_memory`: what a rank holds."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from benchmarks.harness import BenchmarkError, Condition, Context, Figure, benchmark, paired
from benchmarks.proxy.sides import cores, proxied, rank_environment, runtime_build, start_proxies
from benchmarks.runs import environment
from proxy_runtime.channel.ring import Ring
from proxy_runtime.device.launcher import Zygote

_PLAIN = "import torch"
_FIRST = "import torch; torch.ones(1, device='cuda')"
_STARTS_A_REPEAT = 3
_DEVICE_BYTES = 2 << 30


@benchmark("proxy.start")
def start(context: Context) -> Iterator[Figure]:
    """Process start to process end, a warm proxy waiting, over a plain import of torch."""
    scratch, made = context.directory(), runtime_build()
    with Zygote.start(made, log=scratch / "zygote.txt") as zygote:

        def rank() -> float:
            with contextlib.ExitStack() as stack:
                ring = stack.enter_context(Ring.create(0, made.id))
                start_proxies(stack, zygote, [ring], scratch)
                return _run_s(_FIRST, rank_environment(ring), (ring.fd,))

        def plain() -> float:
            return _run_s(_PLAIN, {}, ())

        _each_once(plain, rank)
        times = paired(plain, rank, _STARTS_A_REPEAT * context.repeat)
    added = [b - a for a, b in zip(times.a, times.b, strict=True)]
    details = {"plain_s": times.a, "rank_s": times.b}
    yield Figure("proxy.start", "s", added, Condition("<=", 1), details=details)


@benchmark("proxy.rank_memory")
def rank_memory(context: Context) -> Iterator[Figure]:
    """Resident and private memory of a rank; neither may follow what is allocated on the device."""
    found: list[dict[str, float]] = []
    for _ in range(context.repeat):
        with proxied("memory.py", scratch=context.directory()) as side:
            first = side.ask("first")[0]
            full = side.ask("allocate", size=_DEVICE_BYTES)[0]
        found.append({"rss": first["Rss"], "private": first["Private"], "grown": full["Rss"] - first["Rss"]})
    for name, bound in (("rss", 280), ("private", 170), ("grown", 2)):
        samples = [each[name] / 1e6 for each in found]
        yield Figure(f"proxy.rank_memory.{name}", "MB", samples, Condition("<=", bound))


def _each_once(*runs: Callable[[], float]) -> None:
    """Files come into the page cache, compiled modules beside their sources."""
    for run in runs:
        run()


def _run_s(program: str, more: dict[str, str], descriptors: tuple[int, ...]) -> float:
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment() | more,
        pass_fds=descriptors,
        preexec_fn=lambda: os.sched_setaffinity(0, cores()),
        capture_output=True,
        text=True,
        check=False,
    )
    took = time.perf_counter() - began
    if done.returncode != 0:
        raise BenchmarkError(f"A start ended with exit code {done.returncode}: {done.stderr[-500:]}")
    return took
