"""`proxy.allreduce`: an all-reduce between device proxies of one machine over one by gloo between native ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.harness import BenchmarkError, Condition, Context, Figure, benchmark, paired
from benchmarks.proxy.compare import pairs, ratio, windows_of
from benchmarks.proxy.sides import Side, native, proxied

_SIZES = {
    "1_kb": 1 << 10,
    "16_kb": 16 << 10,
    "128_kb": 128 << 10,
    "1_mb": 1 << 20,
    "8_mb": 8 << 20,
    "64_mb": 64 << 20,
}
_WINDOW_S = 0.1
_RANKS = (2, 4)


def _measure(ranks: int) -> Callable[[Context], Iterator[Figure]]:
    def measure(context: Context) -> Iterator[Figure]:
        scratch = context.directory()
        with (
            native("allreduce.py", scratch=scratch, ranks=ranks) as gloo,
            proxied("allreduce.py", scratch=scratch, ranks=ranks) as ours,
        ):
            for label, size in _SIZES.items():
                for side in (gloo, ours):
                    if not all(answer["equal"] for answer in side.ask("right", size=size)):
                        raise BenchmarkError(f"An all-reduce of {size} bytes gave something else than the sum.")

                def window(side: Side, count: int, size: int = size) -> float:
                    return max(answer["seconds"] for answer in side.ask("reduce", size=size, count=count))

                count = windows_of(_WINDOW_S, lambda n, w=window: w(gloo, n))
                window(ours, count)
                began = gloo.cpu_s(), ours.cpu_s()
                times = paired(
                    lambda w=window, n=count: w(gloo, n), lambda w=window, n=count: w(ours, n), pairs(context.repeat)
                )
                cpu = [side.cpu_s() - before for side, before in zip((gloo, ours), began, strict=True)]
                details = {"count": count, "cpu_ratio": cpu[1] / cpu[0]}
                must = Condition("<=", 1.0)
                yield ratio(f"proxy.allreduce.{ranks}_ranks.{label}", times, must, **details)

    measure.__doc__ = f"{ranks} ranks, one device each."
    return measure


for _ranks in _RANKS:
    benchmark(f"proxy.allreduce.{_ranks}_ranks")(_measure(_ranks))
