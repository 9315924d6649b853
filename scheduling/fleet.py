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
from scheduling.fitting import Fit, Gang, fit
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


Rooms = dict[bytes, dict[NodeId, list[DeviceId]]]
"""Devices that a job may use, by numerics class and node."""


class Fleet:
    """Devices by what may be done with them, kept by node: a question about a job costs time by nodes, not by devices.

    Attributes:
        alive: live nodes, by name.
        pools: classes that have live nodes.
        kept_in_tier: free devices kept from later jobs of one tier only.
        draining: whether devices of ended jobs are not known to be empty yet.
    """

    def __init__(self, state: ClusterState, now: datetime) -> None:
        self.now = now
        self.nodes = {item.node: item for item in state.nodes}
        self.alive = {item.node.name: item for item in state.nodes if item.alive}
        keyed: dict[bytes, list[NodeState]] = {}
        for node in self.alive.values():
            keyed.setdefault(class_key(node.numerics), []).append(node)
        self.pools = tuple(Pool(key, tuple(sorted(keyed[key], key=lambda item: item.node))) for key in sorted(keyed))
        self.pool_of = {node.node: pool.key for pool in self.pools for node in pool.nodes}
        self.kept_in_tier: dict[Tier, set[DeviceId]] = {tier: set() for tier in Tier}
        self._jobs = {item.notice.job: item for item in state.jobs}
        self._model = {device: model.casefold() for node in self.alive.values() for device, model in node.devices}
        held = {device for job in state.jobs for device in job.held_devices}
        self._drains = {device for item in state.draining for device in item.devices}
        strangers = self._with_strangers(state)
        self._open = {
            node.node: [
                device for device, _ in node.devices if device not in held and device not in self._drains
            ] if node.node not in strangers else []
            for node in self.alive.values()
        }  # fmt: skip
        self._kept: dict[NodeId, list[DeviceId]] = {node: [] for node in self._open}
        self._soon: dict[NodeId, list[DeviceId]] = {node: [] for node in self._open}
        self._giver: dict[DeviceId, JobId] = {}
        for job in state.jobs:
            if gives_up(job):
                self.surrender(job)

    def suits(self, demand: Demand) -> tuple[Pool, ...]:
        """The classes that a job may run in: the one that it has run in, or any."""
        if demand.numerics is None:
            return self.pools
        key = class_key(demand.numerics)
        return tuple(pool for pool in self.pools if pool.key == key)

    def capacity(self, demand: Demand) -> Rooms:
        """All devices that a job may use at all."""
        return {
            pool.key: {node.node: self._of_model([device for device, _ in node.devices], demand) for node in pool.nodes}
            for pool in self.suits(demand)
        }

    def usable(self, demand: Demand, *, freeing: bool = False) -> Rooms:
        """Free devices that a job may have, with `freeing` also those that others are giving up."""
        later = self.kept_in_tier[demand.tier]
        found: Rooms = {}
        for pool in self.suits(demand):
            rooms = found[pool.key] = {}
            for node in pool.nodes:
                devices = self._open[node.node]
                if freeing and self._soon[node.node]:
                    devices = [*devices, *self._soon[node.node]]
                if later:
                    devices = [device for device in devices if device not in later]
                rooms[node.node] = self._of_model(devices, demand)
        return found

    def kept(self, demand: Demand) -> Rooms:
        """Free devices that are kept for others and that a job could use."""
        return {
            pool.key: {node.node: self._of_model(self._kept[node.node], demand) for node in pool.nodes}
            for pool in self.suits(demand)
        }

    def with_draining(self, demand: Demand, rooms: Rooms) -> Rooms:
        """`rooms`, and the devices of ended jobs."""
        more: dict[NodeId, list[DeviceId]] = {}
        for device in sorted(self._drains):
            more.setdefault(device.node, []).append(device)
        return {
            key: {node: [*devices, *self._of_model(more.get(node, []), demand)] for node, devices in rooms[key].items()}
            for key in rooms
        }

    def with_jobs(self, demand: Demand, rooms: Rooms, jobs: Iterable[JobState]) -> Rooms:
        """`rooms`, and what `jobs` hold."""
        more: dict[NodeId, list[DeviceId]] = {}
        for job in jobs:
            for device in job.notice.devices:
                more.setdefault(device.node, []).append(device)
        return {
            key: {node: [*devices, *self._of_model(more.get(node, []), demand)] for node, devices in rooms[key].items()}
            for key in rooms
        }

    def of_its_model(self, demand: Demand, devices: Iterable[DeviceId]) -> list[DeviceId]:
        """Those of `devices` that are on live nodes and of the model that a job asks for."""
        return self._of_model([device for device in devices if device in self._model], demand)

    def keep(self, job: JobId, devices: Iterable[DeviceId]) -> None:
        """Keeps devices from all jobs that come later."""
        for device in devices:
            if device in self._open[device.node]:
                self._open[device.node].remove(device)
                self._kept[device.node].append(device)
            else:
                self._soon[device.node].remove(device)

    def take(self, devices: Iterable[DeviceId]) -> None:
        """Devices that are given away by this plan."""
        for device in devices:
            self._open[device.node].remove(device)

    def surrender(self, job: JobState) -> None:
        """A job gives up what it holds, or is told to by this plan."""
        for device in job.notice.devices:
            if device in self._model:
                self._soon[device.node].append(device)
                self._giver[device] = job.notice.job

    def givers(self, devices: Sequence[DeviceId]) -> list[JobState]:
        """The jobs that give up some of `devices`, in order."""
        names = dict.fromkeys(self._giver[device] for device in devices if device in self._giver)
        return [self._jobs[name] for name in names]

    def _of_model(self, devices: list[DeviceId], demand: Demand) -> list[DeviceId]:
        if demand.accelerator is None or not devices:
            return devices
        wanted = demand.accelerator.casefold()
        return [device for device in devices if self._model.get(device) == wanted]

    def _with_strangers(self, state: ClusterState) -> set[NodeId]:
        """Nodes that have parts of jobs that nobody has told of: which devices these use is not known."""
        known = {*self._jobs, *(item.job for item in state.ended), *(item.job for item in state.draining)}
        return {node.node for node in self.alive.values() if any(job not in known for job, _ in node.jobs)}


def find(gang: Gang, rooms: Rooms) -> Fit | None:
    """The best fit within one class: on the fewest nodes, then in the first class."""
    found = [placed for free in rooms.values() if (placed := fit(gang, free)) is not None]
    return min(found, key=lambda item: len(item.nodes), default=None)


def count(rooms: Rooms) -> int:
    """How many devices a job could use, in the class where that is most."""
    return max((sum(map(len, free.values())) for free in rooms.values()), default=0)


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
