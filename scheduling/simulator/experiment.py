"""One workload, one fleet, several policies: what `ergo simulate` runs, and all that is told beside its figures."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Protocol

from model.errors import ModelError
from scheduling.simulator.clusters import Clusters
from scheduling.simulator.levels import simulate_clusters
from scheduling.simulator.measures import Measures, measure
from scheduling.simulator.outcome import Outcome
from scheduling.simulator.synthetic import Kind, generate
from scheduling.simulator.tiers import TierShares, assign_tiers
from scheduling.simulator.traces import Trace
from scheduling.simulator.workload import Costs, Failures, FleetShape, TraceJob

SCHEMA_VERSION = 1


class Simulate(Protocol):
    """The engine."""

    def __call__(
        self,
        jobs: Sequence[TraceJob],
        fleet: FleetShape,
        policy: str,
        *,
        costs: Costs,
        failures: Failures,
        seed: int,
        progress: Callable[[int], None] | None,
    ) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs, all with a tier, and where they come from.

    Attributes:
        source: names of the logs, or of the kind that was made up.
        synthetic: the jobs themselves are made up.
        tiers_made_up: so many of the jobs had no tier and got one by a hash of their id.
        lines: of the logs; `damaged` of these could not be used.
        cut_off: logs that end in the middle, used up to there.
    """

    jobs: tuple[TraceJob, ...]
    source: tuple[str, ...]
    synthetic: bool
    tiers_made_up: int
    shares: TierShares
    seed: int
    lines: int = 0
    damaged: int = 0
    cut_off: tuple[str, ...] = ()

    @classmethod
    def of_trace(cls, trace: Trace, shares: TierShares, seed: int) -> Workload:
        """The jobs of logs."""
        jobs, made_up = assign_tiers(trace.jobs, shares, seed)
        source = tuple(trace.files)
        cut_off = tuple(one.file for one in trace.cut_off)
        return cls(tuple(jobs), source, False, made_up, shares, seed, trace.lines, trace.damaged, cut_off)

    @classmethod
    def made_up(cls, kind: Kind, count: int, devices: int, load: float, shares: TierShares, seed: int) -> Workload:
        """Jobs in the shape of a kind.

        Raises:
            ModelError: ``simulate.synthetic``.
        """
        jobs, made_up = assign_tiers(generate(kind, jobs=count, devices=devices, load=load, seed=seed), shares, seed)
        return cls(tuple(jobs), (f"synthetic {kind}",), True, made_up, shares, seed)

    @property
    def device_s(self) -> float:
        """Device-seconds that the jobs ask for."""
        return sum(job.devices * job.duration_s for job in self.jobs)

    @property
    def span_s(self) -> float:
        """From the first submission to the last."""
        return self.jobs[-1].submit_s

    def load(self, devices: int) -> float | None:
        """Share of so many devices' time, between first and last submission, that is asked for; None for no time."""
        return self.device_s / (devices * self.span_s) if self.span_s > 0 else None

    def at_load(self, devices: int, load: float) -> Workload:
        """The same jobs, submitted faster or slower, so that they ask for this share of the devices' time.

        Raises:
            ModelError: ``simulate.load``: not above 0, or all jobs are submitted at one moment.
        """
        now = self.load(devices)
        if now is None or not 0 < load <= 100:
            why = "all jobs are submitted at one moment" if now is None else "a load is above 0 and at most 100"
            raise ModelError(f"The load cannot be made {load:g}: {why}.", code="simulate.load")
        jobs = tuple(replace(job, submit_s=job.submit_s * now / load) for job in self.jobs)
        return replace(self, jobs=jobs)

    def tiers_sentence(self) -> str:
        """What has to stand beside every figure about tiers."""
        how = f"by a hash of the id with seed {self.seed} ({self.shares})"
        if not self.tiers_made_up:
            return "Tiers are those of the trace."
        if self.tiers_made_up == len(self.jobs):
            return f"Tiers are synthetic: given {how}; the trace has none."
        return f"Tiers of {self.tiers_made_up} of {len(self.jobs)} jobs are synthetic: given {how}."


@dataclass(frozen=True, slots=True)
class Settings:
    """All that the figures depend on."""

    source: tuple[str, ...]
    synthetic: bool
    jobs: int
    lines: int
    damaged: int
    cut_off: tuple[str, ...]
    too_large: int
    tiers: str
    tiers_made_up: int
    load: float | None
    span_s: float
    seed: int
    fleet: FleetShape
    costs: Costs
    failures: Failures
    versions: dict[str, str]
    clusters: Clusters | None = None

    def told(self) -> Iterator[tuple[str, str]]:
        """Every setting: its name, and what it is in words."""
        fleet, costs, failures = self.fleet, self.costs, self.failures
        yield "jobs", f"{self.jobs:,} from {', '.join(self.source)}"
        if self.damaged:
            yield "left out", f"{self.damaged:,} of {self.lines:,} lines, which were damaged"
        if self.cut_off:
            yield "cut off", f"{', '.join(self.cut_off)}: used up to where it can be read"
        if self.too_large:
            who = "the fleet" if self.clusters is None else "any cluster"
            yield "too large", f"{self.too_large:,} of the jobs, for asking for more devices than {who} has"
        yield "tiers", self.tiers
        load = "" if self.load is None else f", at a load of {self.load:.2f}"
        yield "submitted", f"within {self.span_s / 86_400:.1f} days{load}"
        leased = f", {fleet.spot_nodes} of the nodes leased" if fleet.spot_nodes else ""
        yield (
            "fleet",
            f"{fleet.nodes:,} nodes of {fleet.devices_per_node} devices, {fleet.nodes_per_rack} a rack{leased}",
        )
        if self.clusters is not None:
            yield from _told(self.clusters, costs)
        pauses = f"a resize or move {costs.resize_s:g} s, a start {costs.start_s:g} s"
        yield "costs", f"{pauses}, a checkpoint every {costs.checkpoint_every_s:g} s to go back to"
        every = f"of a node every {failures.node_mtbf_s / 86_400:g} days in the mean"
        back = f"back after {failures.repair_s / 3600:g} h"
        yield "failures", f"{every}, {back}; seed {failures.seed}" if failures.node_mtbf_s else "none"
        if fleet.spot_nodes:
            lease = f"{failures.spot_lease_s / 3600:g} h in the mean, {failures.spot_notice_s:g} s notice"
            yield "leases", f"{lease}, then {failures.spot_away_s / 3600:g} h away"
        yield "seed", str(self.seed)
        yield "versions", ", ".join(f"{name} {version}" for name, version in self.versions.items())


@dataclass(frozen=True, slots=True)
class Report:
    """Settings, and the figures of each policy; orjson writes it as the documented JSON."""

    settings: Settings
    policies: tuple[Measures, ...]
    version: int = field(default=SCHEMA_VERSION)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A workload on a fleet."""

    workload: Workload
    fleet: FleetShape
    costs: Costs
    failures: Failures
    seed: int
    clusters: Clusters | None = None
    """What `fleet` is made of, where that is several clusters."""

    @property
    def largest(self) -> int:
        """Devices that a job can have at most: a job stays within one cluster."""
        return self.fleet.devices if self.clusters is None else self.clusters.largest

    @property
    def jobs(self) -> list[TraceJob]:
        """Those that can run: the others ask for more devices than there are, and are left out."""
        return [job for job in self.workload.jobs if job.devices <= self.largest]

    def run(self, policy: str, simulate: Simulate, progress: Callable[[int], None] | None = None) -> Measures:
        """Runs one policy; `progress` is told how many jobs have ended since it was told last."""
        if self.clusters is not None:
            jobs = self.jobs
            homes = self.clusters.homes(jobs, len(self.workload.source))
            outcome = simulate_clusters(
                jobs,
                homes,
                self.clusters,
                policy,
                costs=self.costs,
                failures=self.failures,
                seed=self.seed,
                progress=progress,
            )
            return measure(outcome)
        outcome = simulate(
            self.jobs,
            self.fleet,
            policy,
            costs=self.costs,
            failures=self.failures,
            seed=self.seed,
            progress=progress,
        )
        return measure(outcome)

    def report(self, measures: Sequence[Measures]) -> Report:
        """The figures with all that they depend on."""
        work = self.workload
        settings = Settings(
            source=work.source,
            synthetic=work.synthetic,
            jobs=len(work.jobs),
            lines=work.lines,
            damaged=work.damaged,
            cut_off=work.cut_off,
            too_large=len(work.jobs) - len(self.jobs),
            tiers=work.tiers_sentence(),
            tiers_made_up=work.tiers_made_up,
            load=work.load(self.fleet.devices),
            span_s=work.span_s,
            seed=self.seed,
            fleet=self.fleet,
            costs=self.costs,
            failures=self.failures,
            versions=versions(),
            clusters=self.clusters,
        )
        return Report(settings, tuple(measures))


def _told(clusters: Clusters, costs: Costs) -> Iterator[tuple[str, str]]:
    for region in clusters.regions:
        members = [one for one in clusters.members if one.region == region]
        yield region, ", ".join(f"{one.name} of {one.fleet.nodes:,} nodes" for one in members)
    near, far = costs.between_clusters_s, costs.between_regions_s
    yield "moves", f"a checkpoint is in another cluster after {near:g} s, in another region after {far:g} s"
    for one in clusters.outages:
        yield "lost", f"{one.level} from {one.begin_s / 3600:g} h to {one.end_s / 3600:g} h"
    if clusters.level_mtbf_s:
        every = f"each level every {clusters.level_mtbf_s / 86_400:g} days in the mean"
        yield "lost by chance", f"{every}, for {clusters.level_away_s / 3600:g} h"


@cache
def versions() -> dict[str, str]:
    """Of Python and of Ergosphere, and a digest of the scheduler's sources: figures depend on every line of them."""
    digest = hashlib.blake2b(digest_size=6)
    folder = Path(__file__).resolve().parent.parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    try:
        ours = metadata.version("ergosphere")
    except metadata.PackageNotFoundError:
        ours = "from source"
    return {"ergosphere": ours, "scheduling": digest.hexdigest(), "python": platform.python_version()}
