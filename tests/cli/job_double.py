"""A workflow of the type `Job` that shows what it is told to show: the commands cannot tell it from the real one."""

from __future__ import annotations

import asyncio

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from model.control import DecisionView, JobView
    from model.job_spec import JobSpec
    from model.job_state import JobPhase
    from model.requests import (
        CancelRequest,
        CheckpointRequest,
        MigrateRequest,
        OperationResult,
        PreemptRequest,
        ResumeRequest,
    )


@workflow.defn(name="Job")
class JobDouble:
    """Answers as its last view says."""

    @workflow.init
    def __init__(self, spec: JobSpec) -> None:
        now = workflow.now()
        self._view = JobView(
            id=workflow.info().workflow_id,  # pyright: ignore[reportArgumentType]
            name=spec.name, tenant=spec.tenant, tier=spec.tier, ranks=spec.ranks, phase=JobPhase.QUEUED, held=False,
            step=0, epoch=0, width=0, placement=(), device_of_rank=(), submitted_at=now, gpu_fraction=None,
            preemptions=0, moves=0, recoveries=0, checkpoints=(), decisions=(), transitions=(),
            waiting="it needs 2 devices and 0 are free",
        )  # fmt: skip
        self._end = False

    @workflow.run
    async def run(self, spec: JobSpec) -> str:
        await workflow.wait_condition(lambda: self._end)
        await workflow.wait_condition(workflow.all_handlers_finished)
        return self._view.phase

    @workflow.signal
    def become(self, view: JobView) -> None:
        """What is to be shown from now on."""
        self._view = view

    @workflow.signal
    def end(self) -> None:
        self._end = True

    @workflow.query
    def show(self) -> JobView:
        return self._view

    @workflow.query
    def explain(self) -> list[DecisionView]:
        return [*self._view.decisions, DecisionView(self._view.submitted_at, "waits", self._view.waiting)]

    @workflow.update
    async def preempt(self, request: PreemptRequest) -> OperationResult:
        if request.wait:
            await asyncio.sleep(0.2)
            await workflow.wait_condition(lambda: self._end or request.reason != "for as long as it takes")
        return OperationResult(JobPhase.SUSPENDED, f"preempted: {request.reason}" if request.reason else "preempted")

    @workflow.update
    async def resume(self, request: ResumeRequest) -> OperationResult:
        return OperationResult(JobPhase.QUEUED, "")

    @resume.validator
    def check_resume(self, request: ResumeRequest) -> None:
        if not self._view.held:
            raise ApplicationError("Job is not held: there is nothing to resume", type="job.not-held")

    @workflow.update
    async def checkpoint(self, request: CheckpointRequest) -> OperationResult:
        raise ApplicationError("The cut was called off: a rank holds a socket.", type="job.cut")

    @workflow.update
    async def migrate(self, request: MigrateRequest) -> OperationResult:
        return OperationResult(JobPhase.RUNNING, f"moved to {request.to}")

    @workflow.update
    async def cancel(self, request: CancelRequest) -> OperationResult:
        self._end = True
        return OperationResult(JobPhase.CANCELLED, "cancelled")
