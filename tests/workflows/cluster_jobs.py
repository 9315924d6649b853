"""A small workflow that keeps to the rules of a job, and the floor on which jobs put their feet."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from model.control import TELL_AGAIN, Demand, Directive, JobNotice, NotifyInput
    from model.ids import DeviceId, Epoch, Generation, JobId, TenantId
    from model.job_spec import Tier
    from model.job_state import JobPhase
    from model.names import Activity, Query, Signal
    from model.shape import Shape


@dataclass(frozen=True, slots=True)
class FakeJobInput(Shape):
    """A job that runs for `work_s` seconds in all."""

    cluster: str
    queue: str
    ranks: int
    tier: Tier
    work_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Taken(Shape):
    job: JobId
    devices: tuple[DeviceId, ...] = ()


@dataclass
class Floor:
    """Who is where; a device that is taken twice is remembered for ever."""

    owner: dict[DeviceId, JobId] = field(default_factory=dict)
    story: list[tuple[str, str, int]] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)

    @activity.defn(name="take")
    async def take(self, taken: Taken) -> None:
        for device in taken.devices:
            if self.owner.setdefault(device, taken.job) != taken.job:
                self.doubled.append(f"{device}: {self.owner[device]} and {taken.job}")
                raise ApplicationError(self.doubled[-1], non_retryable=True)
        self.story.append(("take", taken.job, len(taken.devices)))

    @activity.defn(name="give")
    async def give(self, taken: Taken) -> None:
        for device in [device for device, job in self.owner.items() if job == taken.job]:
            self.owner.pop(device)
        self.story.append(("give", taken.job, 0))


@workflow.defn(name="FakeJob")
class FakeJob:
    @workflow.init
    def __init__(self, input: FakeJobInput) -> None:
        self.input = input
        self.job = JobId(workflow.info().workflow_id)
        self.phase = JobPhase.QUEUED
        self.devices: tuple[DeviceId, ...] = ()
        self.number = self.epoch = 0
        self.mail: list[Directive] = []
        self.seen: dict[str, str] = {}
        self.ended = False
        self.submitted = workflow.now()

    @workflow.signal(name=Signal.PLACEMENT)
    def placement(self, directive: Directive) -> None:
        if directive.decision not in self.seen:
            self.seen[directive.decision] = f"{directive.action}: {directive.reason}"
            self.mail.append(directive)

    @workflow.signal
    def finish(self) -> None:
        self.ended = True

    @workflow.query(name=Query.EXPLAIN)
    def explain(self) -> list[str]:
        return list(self.seen.values())

    @workflow.run
    async def run(self, input: FakeJobInput) -> None:
        await self.tell()
        rest = timedelta(seconds=input.work_s)
        while not self.ended:
            since = workflow.now()
            running = self.phase is JobPhase.RUNNING
            try:
                await workflow.wait_condition(lambda: bool(self.mail or self.ended), timeout=rest if running else None)
            except TimeoutError:
                break
            if running:
                rest = max(rest - (workflow.now() - since), timedelta(milliseconds=1))
            if self.mail:
                await self.obey(self.mail.pop(0))
        if self.devices:
            await self.foot("give")
        self.phase, self.devices = JobPhase.COMPLETED, ()
        await self.tell()

    async def obey(self, directive: Directive) -> None:
        waits = self.phase in (JobPhase.QUEUED, JobPhase.SUSPENDED)
        if directive.action == "place" and waits and directive.notice == self.number:
            self.devices, self.phase, self.epoch = directive.devices, JobPhase.STARTING, self.epoch + 1
            await self.tell()
            await self.foot("take")
            self.phase = JobPhase.RUNNING
        elif directive.action == "preempt" and self.phase is JobPhase.RUNNING:
            self.phase = JobPhase.SUSPENDING
            await self.tell()
            await self.foot("give")
            self.phase, self.devices = JobPhase.SUSPENDED, ()
        elif directive.action == "lost" and any(device.node in directive.nodes for device in self.devices):
            await self.foot("give")
            self.phase, self.devices = JobPhase.QUEUED, ()
        elif directive.request != TELL_AGAIN:
            return
        await self.tell()

    async def foot(self, what: str) -> None:
        await workflow.execute_activity(
            what,
            Taken(self.job, self.devices),
            start_to_close_timeout=timedelta(seconds=60),
            retry_policy=RetryPolicy(initial_interval=timedelta(milliseconds=100)),
        )

    async def tell(self) -> None:
        self.number += 1
        input = self.input
        waits = self.phase in (JobPhase.QUEUED, JobPhase.SUSPENDED)
        demand = Demand(
            self.job, TenantId("default"), input.tier, 0, input.ranks, 1, 1, input.ranks, self.submitted
        )  # fmt: skip
        notice = JobNotice(
            self.job, Generation(1), self.number, workflow.info().first_execution_run_id, demand, self.phase,
            Epoch(self.epoch), self.devices, "devices" if waits else "nothing",
        )  # fmt: skip
        await workflow.execute_activity(
            Activity.NOTIFY,
            NotifyInput(input.cluster, notice),
            task_queue=input.queue,
            start_to_close_timeout=timedelta(seconds=30),
            retry_policy=RetryPolicy(
                initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=2)
            ),
        )
