"""Clusters and jobs in a few words, and a driver that plays the jobs' part."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import orjson

from model.codec import to_json
from model.control import (
    AddressedDirective,
    Demand,
    InboxBatch,
    JobClosed,
    JobNotice,
    NodeNotice,
)
from model.ids import DeviceId, Epoch, Generation, JobId, NodeId, TenantId
from model.job_spec import Tier
from model.job_state import JobPhase
from model.manifest import NumericsClass
from model.orders import NodeOrder, QuotaOrder
from scheduling.ledger import apply, commit
from scheduling.policy import decide
from scheduling.state import ClusterState, JobState, Plan

T0 = datetime(2026, 1, 1, tzinfo=UTC)
CPU = NumericsClass(torch="2.15.0", device_model="cpu", instruction_set="AVX512", threads_per_device=1)
OTHER = NumericsClass(torch="2.15.0", device_model="cpu", instruction_set="AVX2", threads_per_device=1)


def node_id(name: str) -> NodeId:
    return NodeId.parse(name if "@" in name else f"{name}@1")


def device_ids(name: str, count: int) -> tuple[DeviceId, ...]:
    return tuple(DeviceId(node_id(name), (f"cpu-{index}",)) for index in range(count))


def node(name, devices=2, *, alive=True, numerics=CPU, jobs=(), model="cpu") -> NodeNotice:
    listed = tuple((device, model) for device in device_ids(name, devices))
    return NodeNotice(node_id(name), alive, listed, numerics, tuple((JobId(job), Epoch(epoch)) for job, epoch in jobs))


def demand(name, ranks=2, tier="basic", *, priority=0, group=1, numerics=None, accelerator=None, after=0.0, **widths):
    return Demand(
        name,
        widths.get("tenant", TenantId("default")),
        Tier(tier),
        priority,
        ranks,
        group,
        widths.get("min_width", 1),
        widths.get("max_width", ranks),
        T0 + timedelta(seconds=after),
        accelerator,
        numerics,
        widths.get("widths", ()),
        widths.get("measured", False),
    )


def notice(name, ranks=2, tier="basic", *, number=1, run="", **fields) -> JobNotice:
    """A queued job that wants devices, unless said otherwise."""
    own = {key: fields.pop(key) for key in list(fields) if key not in _DEMAND}
    made = own.pop("demand", None) or demand(name, ranks, tier, **fields)
    values = {"generation": Generation(1), "phase": JobPhase.QUEUED, "epoch": Epoch(0), "wants": "devices"} | own
    return JobNotice(job=JobId(name), number=number, workflow_run=run or f"run-{name}", demand=made, **values)


_DEMAND = {
    "priority",
    "group",
    "numerics",
    "accelerator",
    "after",
    "min_width",
    "max_width",
    "tenant",
    "widths",
    "measured",
}


class Cluster:
    """A scheduler's state with a clock, told and ticked by hand."""

    def __init__(self, *nodes: NodeNotice) -> None:
        self.state = ClusterState("test")
        self.now = T0
        self.plan: Plan | None = None
        self.mail: tuple[AddressedDirective, ...] = ()
        if nodes:
            self.tell(*nodes)

    def tell(
        self, *items: NodeNotice | JobNotice | JobClosed | NodeOrder | QuotaOrder, after: float = 0.0
    ) -> dict[str, AddressedDirective]:
        """One tick, `after` seconds later; what each job was told."""
        self.now += timedelta(seconds=after)
        batch = InboxBatch(
            tuple(item for item in items if isinstance(item, JobNotice)),
            tuple(item for item in items if isinstance(item, NodeNotice)),
            tuple(item for item in items if isinstance(item, JobClosed)),
            tuple(item for item in items if isinstance(item, NodeOrder)),
            tuple(item for item in items if isinstance(item, QuotaOrder)),
        )
        state = apply(self.state, [batch], self.now)
        self.plan = decide(state, self.now)
        self.state, self.mail = done = _unpack(commit(state, self.plan, self.now))
        written = self.state.to_json()  # also of what the state before had
        assert ClusterState.from_json(written) == self.state
        assert written == orjson.dumps(orjson.loads(to_json(self.state)), option=orjson.OPT_SORT_KEYS)
        assert_exclusive(self.state)
        return {str(item.job): item for item in done[1]}

    def job(self, name: str) -> JobState:
        state = self.state.job(JobId(name))
        assert state is not None, f"{name} is not known"
        return state

    def next(self, name: str, **fields) -> JobNotice:
        """The job's next notice: as the last one, but for `fields`."""
        last = self.job(name).notice
        return replace(last, number=last.number + 1, **fields)

    def run(self, name: str, after: float = 0.0):
        """The job takes up the placement that it was told, and says so."""
        told = self.job(name).told
        assert told is not None and told.directive.action == "place", told
        epoch = Epoch(self.job(name).notice.epoch + 1)
        return self.tell(
            self.next(name, phase=JobPhase.RUNNING, devices=told.directive.devices, wants="nothing", epoch=epoch),
            after=after,
        )

    def resize(self, name: str, after: float = 0.0):
        """The job takes up the width that it was told, says that it does, and then that it runs so."""
        told = self.job(name).told
        assert told is not None and told.directive.action in ("resize", "migrate"), told
        epoch = Epoch(self.job(name).notice.epoch + 1)
        phase = JobPhase.RESIZING if told.directive.action == "resize" else JobPhase.MOVING
        assert not self.tell(self.next(name, phase=phase, wants="nothing", request="", width=0, move_to=None))
        assert self.job(name).told is not None
        devices = told.directive.devices
        return self.tell(self.next(name, phase=JobPhase.RUNNING, devices=devices, epoch=epoch), after=after)

    def stop(self, name: str, after: float = 0.0):
        """The job gives its devices up, and wants some again."""
        return self.tell(self.next(name, phase=JobPhase.SUSPENDED, devices=(), wants="devices"), after=after)

    def end(self, name: str, after: float = 0.0):
        return self.tell(self.next(name, phase=JobPhase.COMPLETED, devices=(), wants="nothing"), after=after)


def _unpack(committed):
    return committed.state, committed.directives


def assert_exclusive(state: ClusterState) -> None:
    """No device belongs to two jobs."""
    owner: dict[DeviceId, str] = {}
    for job in state.jobs:
        for device in job.held_devices:
            assert owner.setdefault(device, job.notice.job) == job.notice.job, f"{device} twice"
