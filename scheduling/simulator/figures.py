"""The rows of the table that a person reads, for the terminal and for the page alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from model.job_spec import Tier
from scheduling.simulator.measures import GUARANTEED, LevelMeasures, Measures, Service

NOTHING = "–"
CLUSTERS_SHOWN = 12
"""With more of them the table would have little else; all are in the JSON."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; one without cells is a heading."""

    label: str
    cells: tuple[str, ...] = ()


def rows(policies: Sequence[Measures]) -> Iterator[Row]:
    """All rows, with one cell a policy."""

    def row(label: str, cell: Callable[[Measures], str]) -> Row:
        return Row(label, tuple(cell(one) for one in policies))

    yield Row("Guaranteed job-hours below their level")
    yield row("from admission", lambda one: missed(one.from_admission))
    yield row("  of so many hours", lambda one: f"{one.from_admission.hours:,}")
    if any(one.from_admission.excused for one in policies):
        yield row("  excused: failures", lambda one: f"{one.from_admission.excused:,}")
    yield row("  last parts, not counted", lambda one: f"{one.from_admission.short:,}")
    yield row("from submission", lambda one: missed(one.from_submission))
    yield row("  of so many hours", lambda one: f"{one.from_submission.hours:,}")
    for tier in GUARANTEED:
        yield row(f"  {tier}", lambda one, tier=tier: missed(one.of(tier).from_submission))
    if any(one.of(tier).admission.count for one in policies for tier in GUARANTEED):
        yield Row("Wait for the promise of a level")
        for tier in GUARANTEED:
            yield row(f"{tier}, mean", lambda one, tier=tier: hours(one.of(tier).admission.mean_s))
            yield row("  99 of 100", lambda one, tier=tier: hours(one.of(tier).admission.p99_s))
            yield row("  ended without", lambda one, tier=tier: _without(one, tier))
    yield Row("GPU fraction from submission")
    for tier in Tier:
        yield row(f"{tier}", lambda one, tier=tier: percent(one.of(tier).gpu_fraction_since_submission))
    yield Row("Completion time, of jobs that ended")
    yield row("jobs that ended", lambda one: f"{one.ended:,}")
    if any(one.never_started for one in policies):
        yield row("jobs that never ran", lambda one: f"{one.never_started:,}")
    yield row("mean", lambda one: hours(one.completion.mean_s))
    for tier in Tier:
        yield row(f"  {tier}", lambda one, tier=tier: hours(one.of(tier).completion.mean_s))
    yield row("median", lambda one: hours(one.completion.median_s))
    yield row("99 of 100", lambda one: hours(one.completion.p99_s))
    yield Row("Mean wait for the first device, by size")
    for size in dict.fromkeys(size.devices for one in policies for size in one.sizes):
        yield row(size, lambda one, size=size: _wait(one, size))
    yield from _clusters(policies)
    yield Row("Use of the devices of healthy nodes")
    yield row("allocated", lambda one: percent(one.allocation))
    yield row("while another job waits", lambda one: percent(one.allocation_while_asked))
    yield Row("What was done to jobs")
    yield row("preemptions a job", lambda one: f"{one.preemptions_per_job:.2f}")
    yield row("resizes a job", lambda one: f"{one.resizes_per_job:.2f}")
    yield row("moves a job", lambda one: f"{one.moves_per_job:.2f}")
    yield row("restarts a job", lambda one: f"{one.restarts_per_job:.2f}")
    yield row("device hours done again", lambda one: f"{one.lost_device_hours:,.0f}")
    yield row("device time not for work", lambda one: percent(one.overhead))
    yield Row("The scheduler")
    yield row("decisions", lambda one: f"{one.decisions:,}")
    yield row("a decision, mean", lambda one: microseconds(one.decision_mean_us))
    yield row("  idle rounds included", lambda one: microseconds(one.decision_all_us))
    yield row("a decision, 99 of 100", lambda one: microseconds(one.decision_p99_us))
    yield row("processor time", lambda one: f"{one.cpu_s:.1f} s")
    yield row("  of the policy's rounds", lambda one: f"{one.policy_cpu_s:.1f} s")


def _clusters(policies: Sequence[Measures]) -> Iterator[Row]:
    """What moves between clusters buy, by the cluster to which jobs were submitted; all of few clusters."""
    names = [one.cluster for one in policies[0].clusters] if policies else []
    if not names:
        return

    def row(label: str, cell: Callable[[Measures], str]) -> Row:
        return Row(label, tuple(cell(one) for one in policies))

    yield Row("Moves between clusters")
    for name in dict.fromkeys(level.level for one in policies for level in one.levels):
        found = [next((level for level in one.levels if level.level == name), None) for one in policies]
        yield _level_row(f"by {name}", found, lambda level: f"{level.moves:,}")
        yield _level_row("  of jobs that had run", found, lambda level: f"{level.after_a_start:,}")
        yield _level_row("  bids", found, lambda level: f"{level.bids:,}")
        yield _level_row("    refused", found, lambda level: f"{level.refused:,}")
        if any(level.away_s for level in found if level is not None):
            yield _level_row("  lost for", found, lambda level: hours(level.away_s))
    if len(names) > CLUSTERS_SHOWN:
        return
    at = {name: number for number, name in enumerate(names)}
    yield Row("Mean wait for the first device, by cluster of submission")
    for name, number in at.items():
        yield row(name, lambda one, number=number: hours(one.clusters[number].waiting.mean_s))
    yield Row("Guaranteed job-hours below level from submission, by cluster of submission")
    for name, number in at.items():
        yield row(name, lambda one, number=number: missed(one.clusters[number].from_submission))
    yield Row("Mean completion time, by cluster of submission")
    for name, number in at.items():
        yield row(name, lambda one, number=number: hours(one.clusters[number].completion.mean_s))


def _level_row(label: str, levels: Sequence[LevelMeasures | None], cell: Callable[[LevelMeasures], str]) -> Row:
    return Row(label, tuple(NOTHING if level is None else cell(level) for level in levels))


def missed(of: Service) -> str:
    """``0.31 %``; what is excused does not count. A few in a hundred thousand must not read as none."""
    if not of.hours:
        return NOTHING
    if of.below == of.excused:
        return "0 %"
    return f"{of.missed * 100:.2f} %" if of.missed >= 1e-4 else "< 0.01 %"


def percent(share: float | None) -> str:
    """``98.1 %``."""
    return NOTHING if share is None else f"{share * 100:.1f} %"


def hours(seconds: float | None) -> str:
    """``6.31 h``."""
    return NOTHING if seconds is None else f"{seconds / 3600:.2f} h"


def microseconds(value: float | None) -> str:
    """``163 µs`` or ``2.31 ms``."""
    if value is None:
        return NOTHING
    return f"{value:.0f} µs" if value < 1000 else f"{value / 1000:.2f} ms"


def _without(one: Measures, tier: Tier) -> str:
    promises = any(one.of(each).admission.count for each in GUARANTEED)
    return f"{one.of(tier).never_admitted:,}" if promises else NOTHING


def _wait(one: Measures, size: str) -> str:
    return hours(next((each.waiting.mean_s for each in one.sizes if each.devices == size), None))
