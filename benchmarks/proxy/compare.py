"""What a comparison of alternating windows says: the median ratio and how sure it is."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

from benchmarks.harness import Condition, Figure, Paired

_RESAMPLES = 2000
_PAIRS_A_REPEAT = 10


def pairs(repeat: int) -> int:
    """How many pairs of windows: 30 for the usual three repetitions."""
    return _PAIRS_A_REPEAT * repeat


def interval(
    samples: Sequence[float], share: float = 0.95, of: Callable[[Sequence[float]], float] = statistics.median
) -> tuple[float, float]:
    """The bootstrap interval of the median (or another statistic); the same for the same samples."""
    draw = random.Random(0)
    found = sorted(of(draw.choices(samples, k=len(samples))) for _ in range(_RESAMPLES))
    cut = (1 - share) / 2
    return found[int(cut * _RESAMPLES)], found[min(int((1 - cut) * _RESAMPLES), _RESAMPLES - 1)]


def ratio(name: str, times: Paired, must: Condition | None, **details: object) -> Figure:
    """Proxied over native, with the interval and both sides' medians in the details."""
    low, high = interval(times.ratios)
    details |= {
        "interval_95": [low, high],
        "native": statistics.median(times.a),
        "proxied": statistics.median(times.b),
    }
    return Figure(name, "x", times.ratios, must, details=dict(details))


def windows_of(window_s: float, one: Callable[[int], float], most: int = 1 << 20) -> int:
    """How many calls of `one` fill a window. It returns the seconds that so many took; asked for 1, 2, 4 and so on."""
    count = 1
    while (took := one(count)) < window_s / 2 and count < most:
        count *= 2
    return max(1, round(count * window_s / took))
