"""Several clusters under regions and a fleet: their sizes, where jobs are submitted, when a level is lost."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from model.errors import ModelError
from scheduling.simulator.policies import FLEET
from scheduling.simulator.workload import FleetShape, TraceJob

_OUTAGE = re.compile(r"(?P<level>[\w-]+):(?P<begin>\d+(\.\d+)?)-(?P<end>\d+(\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster with its own scheduler."""

    name: str
    region: str
    fleet: FleetShape


@dataclass(frozen=True, slots=True)
class Outage:
    """A level is away for some time. It comes back with its state: live it is a durable workflow."""

    level: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Clusters:
    """A fleet of clusters.

    Attributes:
        outages: that somebody wants to see.
        level_mtbf_s: mean time between others, drawn from the seed, of `level_away_s` each; 0: none.
    """

    members: tuple[Cluster, ...]
    outages: tuple[Outage, ...] = ()
    level_mtbf_s: float = 0.0
    level_away_s: float = 4 * 3600.0

    def __post_init__(self) -> None:
        for outage in self.outages:
            if outage.level not in self.levels or outage.begin_s >= outage.end_s:
                raise ModelError(
                    f"There is no level {outage.level} that could be lost from {outage.begin_s / 3600:g} h to "
                    f"{outage.end_s / 3600:g} h: levels are {', '.join(self.levels)}.",
                    code="simulate.levels",
                )

    @property
    def regions(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(dict.fromkeys(one.region for one in self.members))

    @property
    def levels(self) -> tuple[str, ...]:
        """All levels above clusters: regions, and the fleet where there are several."""
        return (*self.regions, FLEET) if len(self.regions) > 1 else self.regions

    @property
    def largest(self) -> int:
        """Devices of the largest cluster: what a job can have at most."""
        return max(one.fleet.devices for one in self.members)

    def homes(self, jobs: Sequence[TraceJob], logs: int) -> list[int]:
        """The number of the cluster to which each job is submitted.

        That of its log, where there are as many logs as clusters. Else the jobs of a tenant come to one cluster, and
        where there is but one tenant, each job to one, by a hash and in proportion to the clusters' sizes. A job that
        is larger than its cluster comes to the largest one.
        """
        shares = list(itertools.accumulate(one.fleet.devices for one in self.members))
        by_tenant = len({job.tenant for job in jobs}) > 1
        by_size = range(len(self.members))
        largest = max(by_size, key=lambda number: self.members[number].fleet.devices)
        found: list[int] = []
        for job in jobs:
            if logs == len(self.members):
                home = job.log
            else:
                digest = hashlib.blake2b((job.tenant if by_tenant else job.id).encode(), digest_size=8).digest()
                point = int.from_bytes(digest) % shares[-1]
                home = next(number for number, share in enumerate(shares) if point < share)
            found.append(home if job.devices <= self.members[home].fleet.devices else largest)
        return found

    def lost(self, level: str, seed: int) -> Iterator[tuple[float, float]]:
        """When a level is away: (from, to) in seconds, ascending and apart, without end where it fails by chance."""
        rng = random.Random(f"{seed}/{level}")
        given = sorted((one.begin_s, one.end_s) for one in self.outages if one.level == level)
        at = 0.0
        while given or self.level_mtbf_s:
            chance = at + rng.expovariate(1.0 / self.level_mtbf_s) if self.level_mtbf_s else float("inf")
            while given and given[0][0] <= chance:
                begin, end = given.pop(0)
                if end > at:
                    yield max(begin, at), end
                    at = max(at, end)
            if chance < float("inf") and chance >= at:
                yield chance, chance + self.level_away_s
                at = chance + self.level_away_s


def parse_clusters(text: str, devices_per_node: int, spot: int, names: Sequence[str]) -> tuple[Cluster, ...]:
    """Reads ``16,21,52/72,10``: nodes of each cluster, regions apart by a slash. `spot` nodes of each are leased.

    They are called as `names` where there are as many, else by their numbers.

    Raises:
        ModelError: ``simulate.clusters``: not two numbers of nodes or more.
    """
    try:
        regions = [[int(part) for part in region.split(",")] for region in text.split("/")]
    except ValueError:
        regions = []
    nodes = [count for region in regions for count in region]
    if len(nodes) < 2 or not all(0 < count <= 1_000_000 for count in nodes) or any(spot > count for count in nodes):
        raise ModelError(
            f"--clusters is {text!r}, but must be the nodes of two clusters or more, no fewer than leased ones.",
            code="simulate.clusters",
            remedy="Write for example --clusters 16,21,52, or 16,21/52,72 for two regions.",
        )
    if len(names) != len(nodes) or len(set(names)) != len(names):
        names = [f"cluster-{number}" for number in range(1, len(nodes) + 1)]
    named = iter(names)
    return tuple(
        Cluster(next(named), f"region-{number}", FleetShape(count, devices_per_node, spot_nodes=spot))
        for number, region in enumerate(regions, 1)
        for count in region
    )


def parse_outages(texts: Sequence[str]) -> tuple[Outage, ...]:
    """Reads ``fleet:24-48``: a level, and the hours from and to which it is lost.

    Raises:
        ModelError: ``simulate.levels``: something else.
    """
    found: list[Outage] = []
    for text in texts:
        match = _OUTAGE.fullmatch(text)
        if match is None:
            raise ModelError(
                f"--lose is {text!r}, but must be a level and the hours from and to which it is away.",
                code="simulate.levels",
                remedy="Write for example --lose region-1:24-48.",
            )
        found.append(Outage(match["level"], float(match["begin"]) * 3600, float(match["end"]) * 3600))
    return tuple(found)
