"""What is reported of a simulated run: one set of figures for every policy, made of its `Outcome` alone."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from model.job_spec import Tier
from scheduling.simulator.outcome import JobOutcome, Outcome

GUARANTEED = (Tier.PREMIUM, Tier.STANDARD)
# Of a distribution: enough to draw it.
QUANTILES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
_SIZES = (1, 4, 8, 16, 64, 256)  # each class ends with one
_COUNTS = (0, 1, 2, 5, 10)
_SAMPLES = 300


@dataclass(frozen=True, slots=True)
class Times:
    """Durations in seconds; None where there are none."""

    count: int
    mean_s: float | None
    median_s: float | None
    p99_s: float | None

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Times:
        """Summarizes them."""
        values = sorted(seconds)
        if not values:
            return cls(0, None, None, None)
        return cls(len(values), statistics.fmean(values), statistics.median(values), quantile(values, 0.99))


@dataclass(frozen=True, slots=True)
class Service:
    """Job-hours of guaranteed jobs, and how many of them missed the level of their tier.

    Attributes:
        excused: of `below`: a failure alone cost more than the level leaves.
        short: last parts of hours that missed the level by their own length, though what they lacked is less than what
            an hour may lack; not in `below`.
        missed: share of the hours below level that nothing excuses, 0 to 1.
    """

    hours: int
    below: int
    excused: int = 0
    short: int = 0
    missed: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "missed", (self.below - self.excused) / self.hours if self.hours else 0.0)


@dataclass(frozen=True, slots=True)
class TierMeasures:
    """The jobs of one tier.

    Attributes:
        completion: from submission to the end, of those that ended.
        admission: from submission until the level was promised, of those to whom it was; `never_admitted` the others.
        from_admission: job-hours counted from when the level was promised; `from_submission` from when it was asked
            for.
        gpu_fraction: of the jobs that ended: their time at full width / their time since admission, each weighted with
            its devices; `gpu_fraction_since_submission` the same since submission. None: no job ended.
        fractions: the jobs' own GPU fractions since submission at `QUANTILES`; empty where no job ended.
    """

    tier: Tier
    jobs: int
    ended: int
    completion: Times
    admission: Times
    never_admitted: int
    from_admission: Service
    from_submission: Service
    gpu_fraction: float | None
    gpu_fraction_since_submission: float | None
    fractions: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SizeMeasures:
    """How long jobs of a range of sizes waited for their first device; those that never had one are only counted."""

    devices: str
    jobs: int
    never_started: int
    waiting: Times


@dataclass(frozen=True, slots=True)
class ClusterMeasures:
    """The jobs that were submitted to a cluster, wherever they ran; `came` and `left`: how many jobs moved to and from
    it.
    """

    cluster: str
    jobs: int
    waiting: Times
    completion: Times
    from_admission: Service
    from_submission: Service
    came: int
    left: int


@dataclass(frozen=True, slots=True)
class LevelMeasures:
    """What a level above clusters did.

    Attributes:
        moves: how many jobs it moved; `after_a_start` of these had run before; `running` were stopped for it.
        bids: how often it asked whether a job would start somewhere; `refused`: how often it would not.
        on_the_way: from when a job was given up until another cluster had it.
        away_s: for how long the level was lost.
    """

    level: str
    moves: int
    after_a_start: int
    running: int
    bids: int
    refused: int
    on_the_way: Times
    away_s: float


@dataclass(frozen=True, slots=True)
class Measures:
    """A policy on a trace.

    Attributes:
        from_admission: of both guaranteed tiers together, as `from_submission`.
        allocation: share of the devices of healthy nodes that jobs had, over the whole run; `allocation_while_asked`
            only while another job waited (None: none ever did).
        allocation_over_time: (seconds, share of the devices of healthy nodes that jobs had, jobs waiting), thinned out.
        preempted: (how often, how many jobs).
        decision_mean_us: microseconds a decision, over rounds that decided something; `decision_quantiles_us` at
            `QUANTILES`; `decision_all_us` with the time of rounds that decided nothing.
        lost_device_hours: work that was lost and had to be done again; `overhead` the share of the device time given
            to jobs that was not their work: that and pauses (None: not all jobs ended).
        waiting_for: reasons of the jobs that still waited at the end, the most frequent ones, with how many jobs.
        clusters, levels: empty where there is one cluster, or no level above it.
        moves_between_clusters: (from, to, how many jobs).
    """

    policy: str
    jobs: int
    ended: int
    never_started: int
    completion: Times
    from_admission: Service
    from_submission: Service
    tiers: tuple[TierMeasures, ...]
    sizes: tuple[SizeMeasures, ...]
    allocation: float | None
    allocation_while_asked: float | None
    allocation_over_time: tuple[tuple[float, float, int], ...]
    preemptions_per_job: float
    resizes_per_job: float
    moves_per_job: float
    restarts_per_job: float
    preempted: tuple[tuple[str, int], ...]
    lost_device_hours: float
    overhead: float | None
    decisions: int
    decision_all_us: float | None
    decision_mean_us: float | None
    decision_p99_us: float | None
    decision_quantiles_us: tuple[float, ...]
    span_s: float
    cpu_s: float
    policy_cpu_s: float
    waiting_for: tuple[tuple[str, int], ...]
    clusters: tuple[ClusterMeasures, ...] = ()
    levels: tuple[LevelMeasures, ...] = ()
    moves_between_clusters: tuple[tuple[str, str, int], ...] = ()

    def of(self, tier: Tier) -> TierMeasures:
        """The measures of one tier."""
        return next(one for one in self.tiers if one.tier is tier)


def measure(outcome: Outcome) -> Measures:
    """All measures of a run."""
    jobs = outcome.jobs
    guaranteed = [job for job in jobs if job.tier in GUARANTEED]
    count = len(jobs) or 1
    latencies = sorted(outcome.decision_us)
    return Measures(
        policy=outcome.policy,
        jobs=len(jobs),
        ended=sum(job.ended_s is not None for job in jobs),
        never_started=sum(job.started_s is None for job in jobs),
        completion=_completion(jobs),
        from_admission=_from_admission(guaranteed),
        from_submission=_from_submission(guaranteed),
        tiers=tuple(_tier(tier, [job for job in jobs if job.tier is tier]) for tier in Tier),
        sizes=tuple(_sizes(jobs)),
        allocation=_ratio(outcome.busy_device_s, outcome.healthy_device_s),
        allocation_while_asked=_ratio(outcome.asked_busy_s, outcome.asked_healthy_s),
        allocation_over_time=_thinned(outcome.samples),
        preemptions_per_job=sum(job.preemptions for job in jobs) / count,
        resizes_per_job=sum(job.resizes for job in jobs) / count,
        moves_per_job=sum(job.moves for job in jobs) / count,
        restarts_per_job=sum(job.restarts for job in jobs) / count,
        preempted=_histogram((job.preemptions for job in jobs), _COUNTS),
        lost_device_hours=sum(job.lost_device_s for job in jobs) / 3600,
        overhead=_overhead(outcome),
        decisions=outcome.decisions,
        decision_all_us=_ratio(outcome.policy_cpu_s * 1e6, outcome.decisions),
        decision_mean_us=statistics.fmean(latencies) if latencies else None,
        decision_p99_us=quantile(latencies, 0.99) if latencies else None,
        decision_quantiles_us=_quantiles(latencies),
        span_s=outcome.span_s,
        cpu_s=outcome.cpu_s,
        policy_cpu_s=outcome.policy_cpu_s,
        waiting_for=tuple(Counter(outcome.reasons.values()).most_common(10)),
        clusters=tuple(_clusters(outcome)),
        levels=tuple(_levels(outcome)),
        moves_between_clusters=tuple(
            (origin, target, count)
            for (origin, target), count in sorted(Counter((move.origin, move.target) for move in outcome.moves).items())
        ),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the values, which are in order, that this share of them does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def _completion(jobs: Iterable[JobOutcome]) -> Times:
    return Times.of(job.completion_s for job in jobs if job.completion_s is not None)


def _from_admission(jobs: Iterable[JobOutcome]) -> Service:
    of = [(job.hours, job.below, job.excused, job.short_below) for job in jobs]
    return Service(*(sum(column) for column in zip(*of, strict=True))) if of else Service(0, 0)


def _from_submission(jobs: Sequence[JobOutcome]) -> Service:
    return Service(sum(job.hours_since_submission for job in jobs), sum(job.below_since_submission for job in jobs))


def _tier(tier: Tier, jobs: Sequence[JobOutcome]) -> TierMeasures:
    return TierMeasures(
        tier=tier,
        jobs=len(jobs),
        ended=sum(job.ended_s is not None for job in jobs),
        completion=_completion(jobs),
        admission=Times.of(job.admitted_s - job.submit_s for job in jobs if job.admitted_s is not None),
        never_admitted=sum(job.admitted_s is None for job in jobs),
        from_admission=_from_admission(jobs),
        from_submission=_from_submission(jobs),
        gpu_fraction=_gpu_fraction(jobs, lambda job: job.admitted_s),
        gpu_fraction_since_submission=_gpu_fraction(jobs, lambda job: job.submit_s),
        fractions=_quantiles(sorted(job.asked_s / done for job in jobs if (done := job.completion_s))),
    )


def _gpu_fraction(jobs: Iterable[JobOutcome], begin: Callable[[JobOutcome], float | None]) -> float | None:
    asked = given = 0.0
    for job in jobs:
        since = begin(job)
        if job.ended_s is not None and since is not None:
            asked += job.devices * job.asked_s
            given += job.devices * (job.ended_s - since)
    return _ratio(asked, given)


def _sizes(jobs: Iterable[JobOutcome]) -> Iterable[SizeMeasures]:
    groups: list[list[JobOutcome]] = [[] for _ in (*_SIZES, None)]
    for job in jobs:
        groups[bisect.bisect_left(_SIZES, job.devices)].append(job)
    for label, members in zip(_labels(_SIZES), groups, strict=True):
        waits = [job.started_s - job.submit_s for job in members if job.started_s is not None]
        if members:
            yield SizeMeasures(label, len(members), len(members) - len(waits), Times.of(waits))


def _clusters(outcome: Outcome) -> Iterable[ClusterMeasures]:
    by_home: dict[str, list[JobOutcome]] = {}
    for job in outcome.jobs:
        by_home.setdefault(job.home, []).append(job)
    came, left = Counter(move.target for move in outcome.moves), Counter(move.origin for move in outcome.moves)
    for name in outcome.clusters:
        jobs = by_home.get(name, [])
        guaranteed = [job for job in jobs if job.tier in GUARANTEED]
        yield ClusterMeasures(
            cluster=name,
            jobs=len(jobs),
            waiting=Times.of(job.started_s - job.submit_s for job in jobs if job.started_s is not None),
            completion=_completion(jobs),
            from_admission=_from_admission(guaranteed),
            from_submission=_from_submission(guaranteed),
            came=came[name],
            left=left[name],
        )


def _levels(outcome: Outcome) -> Iterable[LevelMeasures]:
    for level, record in outcome.levels.items():
        moves = [move for move in outcome.moves if move.level == level]
        yield LevelMeasures(
            level=level,
            moves=len(moves),
            after_a_start=sum(move.ran for move in moves),
            running=sum(move.running for move in moves),
            bids=record.bids,
            refused=record.refused,
            on_the_way=Times.of(move.came_s - move.left_s for move in moves),
            away_s=record.away_s,
        )


def _overhead(outcome: Outcome) -> float | None:
    if any(job.ended_s is None for job in outcome.jobs):
        return None
    used = _ratio(sum(job.devices * job.asked_s for job in outcome.jobs), outcome.busy_device_s)
    return None if used is None else 1 - used


def _thinned(samples: Sequence[tuple[float, int, int, int]]) -> tuple[tuple[float, float, int], ...]:
    """At most `_SAMPLES` of them: means over neighbours, since a burst between two kept ones should still be seen."""
    each = max(1, -(-len(samples) // _SAMPLES))
    thinned: list[tuple[float, float, int]] = []
    for at in range(0, len(samples), each):
        group = samples[at : at + each]
        given, healthy = (sum(sample[column] for sample in group) for column in (1, 2))
        thinned.append((group[0][0], given / healthy if healthy else 0.0, max(sample[3] for sample in group)))
    return tuple(thinned)


def _quantiles(ordered: Sequence[float]) -> tuple[float, ...]:
    return tuple(quantile(ordered, share) for share in QUANTILES) if ordered else ()


def _histogram(values: Iterable[int], ends: Sequence[int]) -> tuple[tuple[str, int], ...]:
    counted = Counter(bisect.bisect_left(ends, value) for value in values)
    return tuple((label, counted[at]) for at, label in enumerate(_labels(ends)))


def _labels(ends: Sequence[int]) -> list[str]:
    """``1``, ``2-4``, ``5-8``, …, ``257+``, from the last number of each range."""
    inner = [f"{low + 1}" if low + 1 == high else f"{low + 1}-{high}" for low, high in pairwise(ends)]
    return [f"{ends[0]}", *inner, f"{ends[-1] + 1}+"]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
