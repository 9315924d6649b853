"""The policy on real job logs, in the simulator, and its speed at fleets of up to half a million devices.

The logs lie beside the repository, in ``shared/traces``. Tiers of the ITP logs are synthetic: 20 % premium, 40 %
standard, 40 % basic, by a hash of the job's id; those of Chronus MIX2 are its classes. How large the clusters were is
not in the logs: see `Case`. Each record says all that again.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import BenchmarkError, Condition, Context, Figure, benchmark
from benchmarks.leftover import shortest_first
from benchmarks.scheduling_scale import calls, reclaims
from model.job_spec import Tier
from scheduling.simulator.charts import LEVELS
from scheduling.simulator.engine import simulate
from scheduling.simulator.experiment import Experiment, Workload
from scheduling.simulator.measures import Measures, TierMeasures, quantile
from scheduling.simulator.tiers import TierShares
from scheduling.simulator.traces import read_traces
from scheduling.simulator.workload import Costs, Failures, FleetShape, TraceJob

ROOT = Path(__file__).resolve().parents[1]
TRACES = ROOT.parent / "shared" / "traces"
CLUSTERS = tuple(f"itp-2021/cluster{number:02}" for number in range(1, 7))
MIX2 = "chronus-philly-slo/mix2"
LOGS = (*CLUSTERS, MIX2)
LARGEST = "itp-2021/cluster04"
SHARES = TierShares(20, 40, 40)
LOAD, NODE, SEED = 0.86, 8, 0
CAP = 0.9
RESIZES_S = (30.0, 2.0, 5.0, 120.0)
# One node in a thousand a day fails; a tenth of the nodes are leased, for twelve hours in the mean.
FAILURES = Failures(seed=SEED, node_mtbf_s=1000 * 86_400.0, spot_lease_s=12 * 3600.0)
FLEETS = (12_000, 100_000, 500_000)


@dataclass(frozen=True, slots=True)
class Case:
    """A log on a fleet.

    Attributes:
        covered: how the fleet is planned. For this share of the time, what may be promised of it is as much as the
            guaranteed tiers would be promised if all of them started at once. 0: nobody has planned; the fleet has as
            few nodes as make the load `LOAD`. Then the guaranteed tiers alone ask for more at times, and wait.
    """

    log: str
    resize_s: float = RESIZES_S[0]
    covered: float = 0.99
    failing: bool = False

    @property
    def name(self) -> str:
        """Of the log."""
        return Path(self.log).name


@cache
def workload(log: str) -> Workload:
    """The jobs of a log.

    Raises:
        BenchmarkError: it is not here.
    """
    path = TRACES / f"{log}.csv.gz"
    if not path.is_file():
        raise BenchmarkError(f"There is no log {path.name}.", remedy="Put the job logs into ../shared/traces.")
    return Workload.of_trace(read_traces([path]), SHARES, SEED)


@cache
def nodes(log: str, covered: float) -> int:
    """How many the fleet has: see `Case`. Twice the largest job fits, and the load is `LOAD` at most."""
    work = workload(log)
    least = max(work.device_s / work.span_s / LOAD, 2 * max(job.devices for job in work.jobs))
    return math.ceil(max(least, promised(work.jobs, covered) / CAP) / NODE)


def promised(jobs: Iterable[TraceJob], share: float) -> float:
    """Devices that are promised at most during this share of the time, if every job starts when it is submitted."""
    changes: list[tuple[float, float]] = []
    for job in jobs:
        level = LEVELS.get(job.tier or Tier.BASIC, 0.0) * job.devices
        changes += [(job.submit_s, level), (job.submit_s + job.duration_s, -level)]
    changes.sort()
    lengths: list[tuple[float, float]] = []
    now = 0.0
    for (at, change), (until, _) in pairwise(changes):
        now += change
        lengths.append((now, until - at))
    left = share * sum(length for _, length in lengths)
    for level, length in sorted(lengths):
        left -= length
        if left <= 0:
            return level
    return max((level for level, _ in lengths), default=0.0)


def experiment(case: Case) -> Experiment:
    """What is run for a case."""
    count = nodes(case.log, case.covered)
    fleet = FleetShape(count, NODE, spot_nodes=count // 10 if case.failing else 0)
    failures = FAILURES if case.failing else Failures(seed=SEED)
    return Experiment(workload(case.log), fleet, Costs(resize_s=case.resize_s), failures, SEED)


@cache
def run(case: Case, policy: str = "ours") -> Measures:
    """A policy on a case; once in a session of benchmarks."""
    return experiment(case).run(policy, simulate)


def conditions(cases: Sequence[Case]) -> dict[str, Any]:
    """What has to be told beside a figure."""
    tried = {case.name: experiment(case) for case in cases}
    return {
        "tiers": {name: one.workload.tiers_sentence() for name, one in tried.items()},
        "nodes_of_8": {name: one.fleet.nodes for name, one in tried.items()},
        "covered": sorted({case.covered for case in cases}),
        "load": {name: round(one.workload.load(one.fleet.devices) or 0.0, 3) for name, one in tried.items()},
        "leased_nodes": {name: one.fleet.spot_nodes for name, one in tried.items() if one.fleet.spot_nodes},
    }


PLANNED = tuple(Case(log) for log in LOGS)
TIGHT = tuple(Case(log, covered=0.0) for log in LOGS)
ROOMY = tuple(Case(log, covered=0.999) for log in LOGS)


@benchmark("scheduling.levels")
def levels(context: Context) -> Iterator[Figure]:
    """Guaranteed job-hours below level, over all logs; a sample is one log."""
    for resize_s in RESIZES_S:
        context.say(f"resize in {resize_s:g} s ...")
        cases = [replace(case, resize_s=resize_s) for case in PLANNED]
        yield from _levels(f"scheduling.levels.resize_{resize_s:g}s", cases, "ours", judged=resize_s == RESIZES_S[0])


@benchmark("scheduling.levels_of_others")
def levels_of_others(context: Context) -> Iterator[Figure]:
    """The same fleets and jobs under other policies."""
    for policy in ("fifo", "backfill", "las", "srtf", "restart"):
        context.say(f"{policy} ...")
        yield from _levels(f"scheduling.levels_of_others.{policy}", PLANNED, policy, judged=False)


@benchmark("scheduling.levels_by_room")
def levels_by_room(context: Context) -> Iterator[Figure]:
    """Smaller and larger fleets. At the smallest the guaranteed tiers alone ask for more than there is at times."""
    for name, cases in (("tight", TIGHT), ("planned", PLANNED), ("roomy", ROOMY)):
        context.say(f"{name} ...")
        yield from _levels(f"scheduling.levels_by_room.{name}", cases, "ours", judged=name != "tight", kept=True)


def _levels(name: str, cases: Sequence[Case], policy: str, *, judged: bool, kept: bool = False) -> Iterator[Figure]:
    found = {case: run(case, policy) for case in cases}
    admission, submission = Condition("<=", 0.0), Condition("<=", 1.0)
    for since, must, services in (
        (
            "from_admission",
            admission if judged or kept else None,
            {case: one.from_admission for case, one in found.items()},
        ),
        ("from_submission", submission if judged else None, {case: one.from_submission for case, one in found.items()}),
    ):
        hours = sum(service.hours for service in services.values())
        if hours:
            below = sum(service.below - service.excused for service in services.values())
            yield Figure(
                f"{name}.{since}",
                "%",
                [100 * service.missed for service in services.values()],
                must,
                value=100 * below / hours,
                details={
                    "below_of_hours": {
                        case.name: [one.below - one.excused, one.hours] for case, one in services.items()
                    },
                    **conditions(cases),
                },
            )


@benchmark("scheduling.failures")
def failures(_: Context) -> Iterator[Figure]:
    """The same while nodes fail and leased ones are taken away: what a failure alone does is counted apart."""
    cases = [replace(case, failing=True) for case in PLANNED]
    services = {case.name: run(case).from_admission for case in cases}
    hours = sum(one.hours for one in services.values())
    details = {
        "below_excused_hours": {name: [one.below, one.excused, one.hours] for name, one in services.items()},
        "failures": "a node in a thousand a day fails; a tenth of the nodes leased for 12 h in the mean",
        **conditions(cases),
    }
    avoidable = sum(one.below - one.excused for one in services.values())
    each = [100 * one.missed for one in services.values()]
    yield Figure(
        "scheduling.failures.avoidable", "%", each, Condition("<=", 0.0), value=100 * avoidable / hours, details=details
    )
    excused = [float(one.excused) for one in services.values()]
    yield Figure("scheduling.failures.unavoidable", "hours", excused, value=sum(excused), details=details)


@benchmark("scheduling.allocation")
def allocation(_: Context) -> Iterator[Figure]:
    """Share of the devices that jobs hold while another job waits; the lowest of all logs counts."""
    for name, cases in (("planned", PLANNED), ("tight", TIGHT)):
        shares = {case.name: run(case).allocation_while_asked for case in cases}
        known = {log: 100 * share for log, share in shares.items() if share is not None}
        yield Figure(
            f"scheduling.allocation.{name}",
            "%",
            list(known.values()),
            Condition(">=", 98.0),
            value=min(known.values()),
            details={"logs": known, **conditions(cases)},
        )


@benchmark("scheduling.completion")
def completion(_: Context) -> Iterator[Figure]:
    """Mean completion time against kill-and-restart: 30 means 30 % less. Whoever keeps levels worse is told, too."""
    for case in PLANNED:
        ours, theirs = run(case), run(case, "restart")
        yield Figure(
            f"scheduling.completion.less_than_restart.{case.name}",
            "%",
            [100 * (1 - _mean(ours) / _mean(theirs))],
            details={
                "missed_from_submission_ours_restart": [100 * one.from_submission.missed for one in (ours, theirs)],
                "mean_h_by_tier_ours_restart": [
                    [_mean(one.of(tier)) / 3600 for tier in Tier] for one in (ours, theirs)
                ],
                "aim": 30,
                **conditions([case]),
            },
        )


@benchmark("scheduling.basic")
def basic(_: Context) -> Iterator[Figure]:
    """The basic tier's mean completion time against shortest-remaining-time-first on what the others leave."""
    ours: list[float] = []
    best: list[float] = []
    ratios: dict[str, float] = {}
    for case in PLANNED:
        tried = experiment(case)
        low = [job for job in tried.jobs if job.tier is Tier.BASIC]
        high = [job for job in tried.jobs if job.tier is not Tier.BASIC]
        alone = simulate(high, tried.fleet, "ours", costs=tried.costs, failures=tried.failures, seed=SEED)
        left = [(at, devices - given) for at, given, devices, _ in alone.samples]
        reference = shortest_first(low, left, tried.fleet.devices)
        mean = _mean(run(case).of(Tier.BASIC))
        ratios[case.name] = mean / statistics.fmean(reference)
        ours.append(mean * len(low))
        best += reference
    yield Figure(
        "scheduling.basic.against_srtf",
        "x",
        list(ratios.values()),
        Condition("<=", 1.15),
        value=sum(ours) / sum(best),
        details={"logs": ratios, **conditions(PLANNED)},
    )


@benchmark("scheduling.preemptions")
def preemptions(_: Context) -> Iterator[Figure]:
    """How often a job loses all its devices to another one, in the mean over all jobs of all logs."""
    for name, cases in (("planned", PLANNED), ("tight", TIGHT)):
        found = [run(case) for case in cases]
        each = {case.name: one.preemptions_per_job for case, one in zip(cases, found, strict=True)}
        jobs = sum(one.jobs for one in found)
        yield Figure(
            f"scheduling.preemptions.{name}",
            "x",
            list(each.values()),
            Condition("<=", 0.3) if name == "planned" else None,
            value=sum(one.preemptions_per_job * one.jobs for one in found) / jobs,
            details={"logs": each, **conditions(cases)},
        )


@benchmark("scheduling.days")
def days(context: Context) -> Iterator[Figure]:
    """Sixty days of the largest cluster's log."""
    tried = experiment(Case(LARGEST))
    wall: list[float] = []
    processor: list[float] = []
    for _ in range(context.repeat):
        begun = time.perf_counter()
        found = tried.run("ours", simulate)
        wall.append(time.perf_counter() - begun)
        processor.append(found.cpu_s)
    details = {"jobs": len(tried.jobs), **conditions([Case(LARGEST)])}
    yield Figure("scheduling.days.wall", "s", wall, Condition("<=", 10.0), details=details)
    yield Figure("scheduling.days.processor", "s", processor)


@benchmark("scheduling.decision")
def decision(context: Context) -> Iterator[Figure]:
    """One decision, at fleets that fill up in ten minutes and then get jobs for an hour; each in its own process.

    In time of the processor, of rounds that decide something; `all_us` in the details has the others with them.
    """
    found: dict[int, dict[str, float]] = {}
    for devices in FLEETS:
        context.say(f"{devices:,} devices ...")
        found[devices] = _in_a_process(devices)
        details = dict(found[devices])
        judged = devices == FLEETS[0]
        name = f"scheduling.decision.{devices // 1000}k"
        mean, p99 = found[devices]["mean_us"] / 1e3, found[devices]["p99_us"] / 1e3
        yield Figure(f"{name}.mean", "ms", [mean], Condition("<=", 0.3) if judged else None, details=details)
        yield Figure(f"{name}.p99", "ms", [p99], Condition("<=", 5.0) if judged else None)
        yield Figure(f"{name}.memory", "MB", [found[devices]["memory_bytes"] / 1e6])
    for devices in FLEETS[1:]:
        growth = found[devices]["mean_us"] / found[FLEETS[0]]["mean_us"]
        yield Figure(f"scheduling.decision.growth_{devices // 1000}k", "x", [growth], Condition("<=", 1.6))
    context.say("work, counted ...")
    counts = [calls(devices) for devices in FLEETS[:2]]
    yield Figure(
        f"scheduling.decision.growth_of_work_{FLEETS[1] // 1000}k",
        "x",
        [counts[1] / counts[0]],
        Condition("<=", 1.6),
        details={"calls_per_decision": dict(zip(map(str, FLEETS), counts, strict=False))},
    )


@benchmark("scheduling.reclaim")
def reclaim(_: Context) -> Iterator[Figure]:
    """A premium gang of 512 devices on 1,000 full nodes: the one decision that makes room for it."""
    took = reclaims(512, 1000, 200)
    details = {"nodes": 1000, "devices": 8000, "gang": 512}
    for name, samples, must in (
        ("p99", [wall * 1e3 for wall, _ in took], Condition("<", 50.0)),
        ("processor_p99", [processor * 1e3 for _, processor in took], None),
    ):
        p99 = quantile(sorted(samples), 0.99)
        yield Figure(f"scheduling.reclaim.{name}", "ms", samples, must, value=p99, details=details)


def _in_a_process(devices: int) -> dict[str, float]:
    code = f"from benchmarks.scheduling_scale import main; main({devices})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BenchmarkError(f"the run with {devices} devices ended with code {done.returncode}: {last}.")
    return json.loads(done.stdout)


def _mean(one: Measures | TierMeasures) -> float:
    if one.ended != one.jobs or one.completion.mean_s is None:
        raise BenchmarkError(f"{one.jobs - one.ended} of {one.jobs} jobs did not end: their times are unknown.")
    return one.completion.mean_s
