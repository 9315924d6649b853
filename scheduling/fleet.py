"""Who may use which device now: an index over a state, and its bookkeeping while a plan is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import orjson

from model.control import Demand
from model.ids import DeviceId, JobId, NodeId
from model.job_spec import Tier
from model.job_state import JobPhase
from model.manifest import NumericsClass
from scheduling.constants import COOL_DOWN_S
from scheduling.fitting import Fit, Free, Gang, fit
from scheduling.state import ClusterState, JobState, NodeState

TIER_RANK = {Tier.PREMIUM: 0, Tier.STANDARD: 1, Tier.BASIC: 2}
"""The total order of tiers, for who comes first and for who gives way."""


def order(job: JobState) -> tuple[int, int, datetime, JobId]:
    """Who comes first: tier, then priority (a higher one first), then who was submitted first."""
    demand = job.notice.demand
    return TIER_RANK[demand.tier], -demand.priority, demand.submitted_at, job.notice.job


def gang_of(demand: Demand) -> Gang:
    """What a job needs at once. This policy knows full width only."""
    return Gang(demand.ranks, demand.max_width, demand.ranks_per_group)


def class_key(numerics: NumericsClass) -> bytes:
    """Sorts and compares numerics classes."""
    return orjson.dumps(numerics.model_dump(), option=orjson.OPT_SORT_KEYS)


@dataclass(frozen=True, slots=True)
class Pool:
    """Live nodes of one numerics class, by name."""

    key: bytes
    nodes: tuple[NodeState, ...]


class Fleet:
    """Devices by what may be done with them.

    Attributes:
        pools: classes that have live nodes.
        free: devices that nobody has, holds or is about to get.
        freeing: devices of jobs that are giving them up, with these jobs.
        kept: taken out of `free` and `freeing` for jobs that come first; grows while a plan is made.
        kept_in_tier: free devices kept from later jobs of one tier only.
    """

    def __init__(self, state: ClusterState, now: datetime) -> None:
        self.now = now
        self.nodes = {item.node: item for item in state.nodes}
        self.alive = {item.node.name: item for item in state.nodes if item.alive}
        keyed: dict[bytes, list[NodeState]] = {}
        for node in self.alive.values():
            keyed.setdefault(class_key(node.numerics), []).append(node)
        self.pools = tuple(Pool(key, tuple(sorted(keyed[key], key=lambda item: item.node))) for key in sorted(keyed))
        self._jobs = {item.notice.job: item for item in state.jobs}
        held = {device for job in state.jobs for device in job.held_devices}
        self.draining = {device for item in state.draining for device in item.devices}
        strangers = self._with_strangers(state)
        self.free: dict[DeviceId, NodeId] = {
            device: node.node
            for pool in self.pools
            for node in pool.nodes
            if node.node not in strangers
            for device, _ in node.devices
            if device not in held and device not in self.draining
        }
        self.freeing: dict[DeviceId, JobId] = {
            device: job.notice.job
            for job in state.jobs
            if gives_up(job)
            for device in job.notice.devices
            if self.lives(device)
        }
        self.kept: dict[DeviceId, JobId] = {}
        self.kept_in_tier: dict[Tier, set[DeviceId]] = {tier: set() for tier in Tier}

    def lives(self, device: DeviceId) -> bool:
        """Whether a device's node is alive."""
        node = self.nodes.get(device.node)
        return node is not None and node.alive

    def suits(self, demand: Demand) -> tuple[Pool, ...]:
        """The classes that a job may run in: the one that it has run in, or any."""
        if demand.numerics is None:
            return self.pools
        key = class_key(demand.numerics)
        return tuple(pool for pool in self.pools if pool.key == key)

    def capacity(self, demand: Demand) -> list[dict[NodeId, list[DeviceId]]]:
        """All devices that a job may use at all, by class and node."""
        return [self._select(pool, demand, None) for pool in self.suits(demand)]

    def find(self, demand: Demand, gang: Gang, usable: Iterable[DeviceId]) -> Fit | None:
        """The best fit on `usable` devices within one class: fewest nodes, then the first class."""
        chosen = set(usable)
        found = [
            placed
            for pool in self.suits(demand)
            if (placed := fit(gang, self._select(pool, demand, chosen))) is not None
        ]
        return min(found, key=lambda item: len(item.nodes), default=None)

    def find_on(self, demand: Demand, gang: Gang, node: NodeState, usable: Iterable[DeviceId]) -> Fit | None:
        """A fit on one node."""
        return fit(gang, self._select(Pool(b"", (node,)), demand, set(usable)))

    def usable(self, job: JobState, *, freeing: bool = False) -> list[DeviceId]:
        """Free devices that a job may have, with `freeing` also those that others are giving up."""
        tier = job.notice.demand.tier
        later = self.kept_in_tier[tier]
        devices = [device for device in self.free if device not in self.kept and device not in later]
        if freeing:
            devices += [device for device in self.freeing if device not in self.kept and device not in later]
        return devices

    def of_its_kind(self, demand: Demand, devices: Iterable[DeviceId]) -> int:
        """How many of `devices` a job could use, in the class where that is most."""
        chosen = set(devices)
        pools = (self._select(pool, demand, chosen) for pool in self.suits(demand))
        return max((sum(map(len, pool.values())) for pool in pools), default=0)

    def keep(self, job: JobId, devices: Iterable[DeviceId]) -> None:
        """Keeps devices from all jobs that come later."""
        self.kept.update((device, job) for device in devices)

    def take(self, devices: Iterable[DeviceId]) -> None:
        """Devices that are given away by this plan."""
        for device in devices:
            self.free.pop(device, None)

    def surrender(self, job: JobState) -> None:
        """A job is preempted by this plan."""
        self.freeing.update((device, job.notice.job) for device in job.notice.devices if self.lives(device))

    def givers(self, devices: Sequence[DeviceId]) -> list[JobState]:
        """The jobs that give up some of `devices`, in order."""
        names = dict.fromkeys(self.freeing[device] for device in devices if device in self.freeing)
        return [self._jobs[name] for name in names]

    def _select(self, pool: Pool, demand: Demand, chosen: set[DeviceId] | None) -> dict[NodeId, list[DeviceId]]:
        wanted = demand.accelerator.casefold() if demand.accelerator else None
        return {
            node.node: [
                device
                for device, model in node.devices
                if (chosen is None or device in chosen) and (wanted is None or model.casefold() == wanted)
            ]
            for node in pool.nodes
        }

    def _with_strangers(self, state: ClusterState) -> set[NodeId]:
        """Nodes that have parts of jobs that nobody has told of: which devices these use is not known."""
        known = {*self._jobs, *(item.job for item in state.ended), *(item.job for item in state.draining)}
        return {node.node for node in self.alive.values() if any(job not in known for job, _ in node.jobs)}


def gives_up(job: JobState) -> bool:
    """Whether a job's devices will be free soon: it was told to stop, or a person has told it to."""
    if not job.notice.devices:
        return False
    return (job.told is not None and job.told.directive.action == "preempt") or job.notice.held


def cool_until(job: JobState) -> datetime | None:
    """Until when a job is left alone."""
    return job.changed_at + timedelta(seconds=COOL_DOWN_S) if job.changed_at else None


def may_give_way(job: JobState) -> bool:
    """Whether a job can be preempted at all, apart from its tier and from when it was last changed."""
    idle = job.told is None or job.told.directive.action == "refuse"
    runs = job.notice.phase in (JobPhase.STARTING, JobPhase.RUNNING)
    return bool(job.notice.devices) and idle and runs and not job.notice.held


__all__ = ["TIER_RANK", "Fleet", "Free", "Pool", "cool_until", "gang_of", "gives_up", "may_give_way", "order"]
