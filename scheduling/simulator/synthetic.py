"""Job logs that nobody wrote, for fleets of any size: shapes of real ones, drawn from a seed.

Durations, sizes and bursts are those of six ITP clusters (microsoft/elasticflow-traces, MIT; 32,211 jobs, measured from
the logs). The sizes of the `llm` kind are those of the Kalos cluster (InternLM/AcmeTrace, CC-BY-4.0, recovered from the
figures of its paper). Tenants are made up: shares as 1, 1/2, 1/3 and so on.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from model.errors import ModelError
from scheduling.simulator.workload import TraceJob

TENANTS = 11
# A burst is what one person submits at once: so many jobs in the median, with this spread of the logarithm. At the rate
# of an ITP cluster that gives its counts an hour: variance some 20 to 70 times the mean, a third of the hours empty.
_BURST_MEDIAN = 3.0
_BURST_SIGMA = 1.5
_BETWEEN_S = 30.0  # jobs of a burst

_QUANTILES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)


@dataclass(frozen=True, slots=True)
class _Class:
    """Jobs of like size.

    Attributes:
        sizes: devices, with the share of each among all jobs in percent.
        durations_s: at `_QUANTILES`.
    """

    sizes: tuple[tuple[int, float], ...]
    durations_s: tuple[float, ...]

    @property
    def share(self) -> float:
        return sum(share for _, share in self.sizes)


_ITP = (
    _Class(((1, 74.33),), (600, 979, 1088, 3658, 7567, 13227, 21904, 36029, 106411, 181693, 506719)),
    _Class(((2, 1.18), (4, 3.18)), (601, 737, 816, 3006, 6901, 18125, 60910, 102482, 372395, 1079960, 1114383)),
    _Class(((8, 18.85),), (600, 1053, 1873, 6486, 15381, 37859, 84935, 146669, 483046, 992727, 1237189)),
    _Class(
        ((16, 1.17), (32, 1.07), (64, 0.22)),
        (602, 819, 1416, 3981, 44056, 107974, 201863, 298626, 548801, 1022894, 1022894),
    ),
)
# Of all of them together.
_ITP_ALL_S = (600, 973, 1159, 4102, 7810, 16204, 38246, 72187, 207500, 775806, 1237189)
# Kalos, from the figures "CDF of jobs" and "CDF of GPU time" by the number of GPUs: up to so many, so many percent.
KALOS_JOBS = (
    (1, 86.3), (2, 88.4), (4, 88.4), (8, 93.9), (16, 94.3), (32, 94.7), (64, 95.3), (128, 95.7), (256, 96.9),
    (512, 98.1), (1024, 100.0),
)  # fmt: skip
KALOS_GPU_TIME = (
    (1, 0.2), (2, 0.2), (4, 0.2), (8, 0.6), (16, 0.6), (32, 2.0), (64, 3.3), (128, 3.7), (256, 24.9), (512, 64.1),
    (1024, 100.0),
)  # fmt: skip
# Sizes whose shares of GPU time are rounded to next to nothing are told apart by them only together.
_KALOS_GROUPS = ((1, 2, 4, 8, 16), (32, 64, 128), (256,), (512,), (1024,))


class Kind(StrEnum):
    """Whose sizes the jobs have."""

    ITP = "itp"
    LLM = "llm"


def generate(kind: Kind, *, jobs: int, devices: int, load: float = 0.85, seed: int = 0) -> list[TraceJob]:
    """Jobs in the order of submission, from second 0 on, without tiers.

    Args:
        jobs: how many.
        devices: of the fleet. No job asks for more of them; the sizes above are left out, in all proportions.
        load: share of the fleet's device time, from the first submission to the last, that the jobs ask for.
        seed: the same arguments give the same jobs.

    Raises:
        ModelError: ``simulate.synthetic``: no jobs, no devices or no load asked for.
    """
    if jobs < 1 or devices < 1 or not 0 < load <= 100:
        raise ModelError(
            f"{jobs} jobs at a load of {load:g} on {devices} devices cannot be made up.",
            code="simulate.synthetic",
            remedy="Ask for at least one job, and for a load above 0 and up to 100.",
        )
    rng = random.Random(f"{seed}/{kind}/{jobs}")
    classes = _within(_kalos() if kind is Kind.LLM else _ITP, devices)
    asked = [_draw(rng, classes) for _ in range(jobs)]
    span_s = sum(size * duration_s for size, duration_s in asked) / (devices * load)
    arrivals = sorted(_arrivals(rng, jobs, span_s))
    begin, end = arrivals[0][0], arrivals[-1][0]
    stretch = span_s / (end - begin) if end > begin else 1.0  # few bursts do not fill the span
    return [
        TraceJob(f"{kind}-{index:0{len(str(jobs))}}", (submit_s - begin) * stretch, duration_s, size, tenant)
        for index, ((submit_s, tenant), (size, duration_s)) in enumerate(zip(arrivals, asked, strict=True))
    ]


def _draw(rng: random.Random, classes: Sequence[_Class]) -> tuple[int, float]:
    of = rng.choices(classes, [one.share for one in classes])[0]
    size = rng.choices([size for size, _ in of.sizes], [share for _, share in of.sizes])[0]
    return size, round(_between(_QUANTILES, of.durations_s, rng.random()))


def _arrivals(rng: random.Random, jobs: int, span_s: float) -> Iterator[tuple[float, str]]:
    weights = [1 / rank for rank in range(1, TENANTS + 1)]
    left = jobs
    while left:
        size = min(left, math.ceil(rng.lognormvariate(math.log(_BURST_MEDIAN), _BURST_SIGMA)))
        tenant = f"tenant-{rng.choices(range(1, TENANTS + 1), weights)[0]:02}"
        at = rng.random() * span_s
        for _ in range(size):
            yield round(at, 3), tenant
            at += rng.expovariate(1 / _BETWEEN_S)
        left -= size


def _between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear in the logarithm of `ys`."""
    at = bisect.bisect_right(xs, x, 1, len(xs) - 1)
    part = (x - xs[at - 1]) / (xs[at] - xs[at - 1])
    return ys[at - 1] ** (1 - part) * ys[at] ** part


def _within(classes: Sequence[_Class], devices: int) -> list[_Class]:
    fitting = [
        _Class(tuple((size, share) for size, share in one.sizes if size <= devices), one.durations_s) for one in classes
    ]
    return [one for one in fitting if one.sizes]


def _kalos() -> tuple[_Class, ...]:
    """Kalos' sizes with ITP's durations, made longer or shorter by size, so that GPU time is spread as in Kalos."""
    jobs, gpu_time = _shares(KALOS_JOBS), _shares(KALOS_GPU_TIME)
    # How long a job of a group takes, in a unit that is the same for all.
    relative = [
        sum(gpu_time[size] for size in group) / sum(size * jobs[size] for size in group) for group in _KALOS_GROUPS
    ]
    shares = [sum(jobs[size] for size in group) for group in _KALOS_GROUPS]
    mean = sum(share * length for share, length in zip(shares, relative, strict=True)) / sum(shares)
    return tuple(
        _Class(
            tuple((size, jobs[size]) for size in group if jobs[size]),
            tuple(value * length / mean for value in _ITP_ALL_S),
        )
        for group, length in zip(_KALOS_GROUPS, relative, strict=True)
    )


def _shares(cumulated: Sequence[tuple[int, float]]) -> dict[int, float]:
    return {size: upper - lower for (_, lower), (size, upper) in itertools.pairwise(((0, 0.0), *cumulated))}
