"""Stand-ins for 1,000 nodes and thousands of jobs: all that `scheduling.live` does not run in earnest.

A node is a record that is renewed; a job is a small workflow that keeps to the rules of `workflows.job` towards the
scheduler, and stands on devices of the `Floor` instead of running ranks. Temporal, the scheduler's worker, its
workflow, its observer and its store are real.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy

from model.control import TELL_AGAIN, Demand, Directive, JobNotice, NotifyInput
from model.ids import DeviceId, Epoch, Generation, JobId, NodeId, Step, TenantId
from model.job_spec import Tier
from model.job_state import JobPhase
from model.manifest import NumericsClass
from model.names import CLUSTER_TASK_QUEUE, Activity, Signal
from model.records import JobOnNode, NodeDevice, NodeRecord
from model.shape import Shape
from proxy_runtime.errors import ErgoError
from proxy_runtime.storage.fleet import FleetStore

NUMERICS = NumericsClass(torch="2.15.0", device_model="standin", instruction_set="AVX512", threads_per_device=1)
START_S, STOP_S = 4.0, 2.0
"""What a start and a stop with a checkpoint take on the local fleet, as the demo measures them."""


@dataclass
class Floor:
    """Who stands on which device, and which decisions have come. One for the whole process: see `StandInJob`.

    Attributes:
        doubled: devices on which two jobs have stood.
        told: how often each decision has come, by its id.
        obeyed: of each job and notice the decisions by which it has changed.
    """

    owner: dict[DeviceId, JobId] = field(default_factory=dict[DeviceId, JobId])
    on_node: dict[NodeId, dict[JobId, tuple[Epoch, int, float]]] = field(
        default_factory=dict[NodeId, dict[JobId, tuple[Epoch, int, float]]]
    )
    doubled: list[str] = field(default_factory=list[str])
    told: Counter[tuple[JobId, str]] = field(default_factory=Counter[tuple[JobId, str]])
    actions: Counter[str] = field(default_factory=Counter[str])
    phases: dict[JobId, JobPhase] = field(default_factory=dict[JobId, JobPhase])

    def take(self, job: JobId, epoch: Epoch, devices: tuple[DeviceId, ...]) -> None:
        """A job's processes are on these devices from now on."""
        for device in devices:
            if self.owner.setdefault(device, job) != job:
                self.doubled.append(f"{device} was given to {job} while {self.owner[device]} had it")
        now = time.monotonic()
        for node, count in Counter(device.node for device in devices).items():
            self.on_node.setdefault(node, {})[job] = epoch, count, now

    def leave(self, job: JobId, devices: tuple[DeviceId, ...]) -> None:
        """None of its processes is left."""
        for device in devices:
            if self.owner.get(device) == job:
                del self.owner[device]
        for node in {device.node for device in devices}:
            self.on_node.get(node, {}).pop(job, None)

    def parts(self, node: NodeId) -> tuple[JobOnNode, ...]:
        """What a node says that it has."""
        now = time.monotonic()
        here = sorted(self.on_node.get(node, {}).items())
        return tuple(
            JobOnNode(job=job, epoch=epoch, step=Step(0), device_ms=int(1000 * count * (now - since)))
            for job, (epoch, count, since) in here
        )


FLOOR = Floor()
_MOVES = ("migrate", "resize")


@dataclass(frozen=True, slots=True)
class StandInInput(Shape):
    """A job that needs `ranks` devices, `unit` neighbours on one node, and `work_s` seconds on them."""

    cluster: str
    tenant: str
    tier: Tier
    ranks: int
    unit: int
    work_s: float


@workflow.defn(name="StandInJob", sandboxed=False)
class StandInJob:
    """Obeys the scheduler as a job does. What it tells the floor is told once, unless its worker has failed."""

    @workflow.init
    def __init__(self, input: StandInInput) -> None:
        self._input = input
        self._job = JobId(workflow.info().workflow_id)
        self._phase = JobPhase.QUEUED
        self._devices: tuple[DeviceId, ...] = ()
        self._number = self._epoch = 0
        self._mail: list[Directive] = []
        self._seen: set[str] = set()
        self._submitted = self._since = workflow.now()
        self._delivered_ms = 0

    @workflow.signal(name=Signal.PLACEMENT)
    def placement(self, directive: Directive) -> None:
        """A decision about it; one that has come before is ignored."""
        if not workflow.unsafe.is_replaying():
            FLOOR.told[self._job, directive.decision] += 1
        if directive.decision not in self._seen:
            self._seen.add(directive.decision)
            self._mail.append(directive)

    @workflow.run
    async def run(self, input: StandInInput) -> None:
        """Until its work is done."""
        await self._tell()
        rest = timedelta(seconds=input.work_s)
        while True:
            since, runs = workflow.now(), self._phase is JobPhase.RUNNING
            try:
                await workflow.wait_condition(lambda: bool(self._mail), timeout=rest / self._share if runs else None)
            except TimeoutError:
                break
            if runs:
                rest = max(rest - (workflow.now() - since) * self._share, timedelta(milliseconds=1))
            await self._obey(self._mail.pop(0))
        await self._become(JobPhase.COMPLETED, leave=True)

    @property
    def _share(self) -> float:
        """How fast it gets on."""
        return len(self._devices) / self._input.ranks

    async def _obey(self, directive: Directive) -> None:
        waits = self._phase in (JobPhase.QUEUED, JobPhase.SUSPENDED)
        if not workflow.unsafe.is_replaying():
            FLOOR.actions[directive.action] += 1
        if directive.action == "place" and waits and directive.notice == self._number:
            self._devices, self._epoch = directive.devices, self._epoch + 1
            if not workflow.unsafe.is_replaying():
                FLOOR.take(self._job, Epoch(self._epoch), self._devices)
            await self._become(JobPhase.STARTING)
            await asyncio.sleep(START_S)
            await self._become(JobPhase.RUNNING)
        elif directive.action in _MOVES and self._phase is JobPhase.RUNNING and directive.notice == self._number:
            before, self._epoch = self._devices, self._epoch + 1
            await self._become(JobPhase.RESIZING if directive.action == "resize" else JobPhase.MOVING)
            await asyncio.sleep(START_S)
            self._devices = directive.devices
            if not workflow.unsafe.is_replaying():
                FLOOR.leave(self._job, before)
                FLOOR.take(self._job, Epoch(self._epoch), self._devices)
            await self._become(JobPhase.RUNNING)
        elif directive.action == "preempt" and self._phase is JobPhase.RUNNING:
            await self._become(JobPhase.SUSPENDING)
            await asyncio.sleep(STOP_S)
            await self._become(JobPhase.SUSPENDED, leave=True)
        elif directive.action == "lost" and any(device.node in directive.nodes for device in self._devices):
            await self._become(JobPhase.QUEUED, leave=True)
        elif directive.request == TELL_AGAIN:
            await self._tell()

    async def _become(self, phase: JobPhase, *, leave: bool = False) -> None:
        now = workflow.now()
        if self._phase is JobPhase.RUNNING:
            self._delivered_ms += round(1000 * (now - self._since).total_seconds()) * len(self._devices)
        self._phase, self._since = phase, now
        if leave:
            if not workflow.unsafe.is_replaying():
                FLOOR.leave(self._job, self._devices)
            self._devices = ()
        await self._tell()

    async def _tell(self) -> None:
        self._number += 1
        input = self._input
        if not workflow.unsafe.is_replaying():
            FLOOR.phases[self._job] = self._phase
        waits = self._phase in (JobPhase.QUEUED, JobPhase.SUSPENDED)
        demand = Demand(
            self._job, TenantId(input.tenant), input.tier, 0, input.ranks, input.unit, 1, input.ranks, self._submitted,
            widths=_widths(input.ranks), measured=True,
        )  # fmt: skip
        notice = JobNotice(
            self._job, Generation(1), self._number, workflow.info().first_execution_run_id, demand, self._phase,
            Epoch(self._epoch), self._devices, "devices" if waits else "nothing",
            since=self._since, delivered_ms=self._delivered_ms,
        )  # fmt: skip
        await workflow.execute_activity(
            Activity.NOTIFY.value,
            NotifyInput(input.cluster, notice),
            task_queue=CLUSTER_TASK_QUEUE,
            start_to_close_timeout=timedelta(seconds=30),
            retry_policy=RetryPolicy(
                initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=2)
            ),
        )


def _widths(ranks: int) -> tuple[int, ...]:
    """Those that a data-parallel job can have: by halves, as far as these are whole."""
    found = [ranks]
    while found[-1] % 2 == 0:
        found.append(found[-1] // 2)
    return tuple(reversed(found))


class StandInNodes:
    """Nodes that are only records, renewed as agents renew theirs.

    Args:
        store: the fleet's.
        cluster: whose they are.
        count: how many.
        devices: of each.
        lease_s: of each; an agent's own is 10 s, and 1,000 of these are more writes than one small machine can do.
    """

    def __init__(self, store: FleetStore, cluster: str, count: int, devices: int, lease_s: float) -> None:
        self._store = store
        self._lease_s = lease_s
        self._threads = ThreadPoolExecutor(4, "standin-nodes")
        self.records: list[NodeRecord] = []
        self.renewals = 0
        self.late_s = 0.0
        for index in range(count):
            node = NodeId(f"node-{index:04}", 1)
            self.records.append(
                NodeRecord(
                    node=node,
                    cluster=cluster,
                    boot_id="standin",
                    address="127.0.0.1:9",
                    devices=tuple(
                        NodeDevice(id=DeviceId(node, (f"gpu-{n}",)), accelerator="standin") for n in range(devices)
                    ),
                    numerics=NUMERICS,
                    lease_s=lease_s,
                )
            )

    async def begin(self) -> None:
        """Writes all records."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            *(loop.run_in_executor(self._threads, self._store.claim_node, record) for record in self.records)
        )

    async def run(self) -> None:
        """Renews each every fifth of its lease, until cancelled."""
        loop = asyncio.get_running_loop()
        gap = self._lease_s / 5 / len(self.records)
        due = loop.time()
        while True:
            for record in self.records:
                due += gap
                await asyncio.sleep(max(0.0, due - loop.time()))
                self.late_s = max(self.late_s, loop.time() - due)
                loop.run_in_executor(self._threads, self._renew, record)

    def _renew(self, record: NodeRecord) -> None:
        try:
            self._store.renew_node(record.model_copy(update={"jobs": FLOOR.parts(record.node)}))
            self.renewals += 1
        except ErgoError:
            pass  # a record that several write at once: the next renewal is soon

    def close(self) -> None:
        """Ends its threads."""
        self._threads.shutdown(cancel_futures=True)
