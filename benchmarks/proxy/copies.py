"""`proxy.copies`: bandwidth between host and device over that of one memcpy, in one process."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness import BenchmarkError, Condition, Context, Figure, benchmark, paired
from benchmarks.proxy.compare import pairs, ratio
from benchmarks.proxy.sides import proxied

_SIZES = {"64_mb": 64 << 20, "1_mb": 1 << 20}
_BYTES = 128 << 20  # a window copies so many
_SHARE = {"pinned": 0.8, "pageable": 0.5}


@benchmark("proxy.copies")
def copies(context: Context) -> Iterator[Figure]:
    """64 MB, larger than the ring, and 1 MB."""
    with proxied("copies.py", scratch=context.directory()) as side:
        for label, size in _SIZES.items():
            side.ask("make", size=size)
            for kind, share in _SHARE.items():
                if not side.ask("right", size=size, kind=kind)[0]["equal"]:
                    raise BenchmarkError("What was copied to the device came back different.")
                for direction in ("h2d", "d2h"):

                    def window(what: str, kind: str = kind, size: int = size) -> float:
                        count = _BYTES // size
                        return side.ask("timed", what=what, kind=kind, size=size, count=count)[0]["seconds"]

                    before = side.waited_s()
                    # Bandwidths compare as the inverse of times: memcpy over copy.
                    times = paired(
                        lambda d=direction, w=window: w(d), lambda w=window: w("memcpy"), pairs(context.repeat)
                    )
                    rates = {
                        "gb_s": _BYTES / 1e9 / sorted(times.a)[len(times.a) // 2],
                        # A window is shorter than a turn of the scheduler: where others run, windows wait or do not.
                        "waited_s": side.waited_s() - before,
                    }
                    must = Condition(">=", share) if label == "64_mb" else None
                    yield ratio(f"proxy.copies.{direction}.{kind}.{label}", times, must, **rates)
