"""The workflow type ``Job``: what a client of the workflow engine can say to it, and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta, timezone
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError

from model.control import TELL_AGAIN, DecisionView, Directive, JobView
from model.errors import ModelError
from model.ids import JobId
from model.job_spec import UNEVEN, JobSpec, parse_job_spec, parse_submitted_spec
from model.job_state import JobPhase
from model.names import JOB_WORKFLOW, Query, Signal, Update
from model.requests import (
    CancelRequest,
    CheckpointRequest,
    JobEnd,
    MigrateRequest,
    OperationResult,
    PreemptRequest,
    ResizeRequest,
    ResumeRequest,
)
from model.sharing import SharingNotice
from model.splicing import check_width
from model.units import counted
from workflows.job import answers, driver, outbox, patches, recover, sharing, telling
from workflows.job.core import Job, Request, keep_last
from workflows.job.errors import refusal
from workflows.job.state import KEPT_DECISIONS, KEPT_LOST, JobState, MoveRequest
from workflows.job.turns import Line
from workflows.job.views import details, view

ANSWER = timedelta(seconds=120)
"""How long a request to move waits for the scheduler's answer."""

_MOVED = (JobPhase.MOVING, JobPhase.RESIZING)


@workflow.defn(name=JOB_WORKFLOW)
class JobWorkflow:
    """One job for life: queued, placed, preempted, moved, recovered, ended.

    Its id is the job's id; its input a JobSpec v1 as plain JSON. It ends completed with a `JobEnd`, failed with an
    error of the type ``job.failed``, or cancelled; an input that is no JobSpec fails it at once.
    """

    @workflow.init
    def __init__(self, spec: Any = None, carried: JobState | None = None) -> None:
        info = workflow.info()
        self._cancelled = False
        self._fault = ""
        self._code = ""
        self._line = Line()
        try:
            job_id = JobId(info.workflow_id)
            parsed = _parsed(spec, begun=carried is not None)
        except ModelError as error:
            self._fault, self._code = _faults(info.workflow_id, spec), error.code
            job_id, parsed = _id_of(info.workflow_id), JobSpec(apiVersion="ergosphere/v1", argv=("true",))
        self._spec = spec
        state = carried or JobState(
            job=job_id,
            first_run=info.first_execution_run_id,
            submitted_at=info.workflow_start_time.astimezone(timezone.utc),  # noqa: UP017
        )
        if self._fault:
            state.phase, state.failure, state.waiting = JobPhase.FAILED, self._fault, ""
        self._job = Job(parsed, state, details)
        workflow.register_random_seed_callback(self._on_reset)

    @workflow.run
    async def run(self, spec: Any = None, carried: JobState | None = None) -> JobEnd:
        """Runs the job to its end."""
        if self._fault:
            raise ApplicationError(self._fault, type=self._code, non_retryable=True)
        job = self._job
        patches.decide()
        told = telling.begin(job)
        while True:
            drive = asyncio.create_task(driver.drive(job))
            await self._until(drive.done)
            if drive.result() == "ended":
                break
            if driver.renewable(job):  # nothing has come in since
                workflow.continue_as_new(args=[self._spec, job.state])
        await self._finish()
        for task in told:
            task.cancel()
        return self._end()

    async def _finish(self) -> None:
        """Everybody is told before the workflow closes: it stays open as long as that takes."""
        job = self._job
        while True:
            ended = asyncio.create_task(telling.all_told(job))
            await self._until(ended.done)
            if not job.reopen:
                break
            again = asyncio.create_task(recover.reopen_ended(job))
            await self._until(again.done)
        await self._until(workflow.all_handlers_finished)

    def _end(self) -> JobEnd:
        end = self._job.state.end
        if end is None:
            raise ApplicationError("The job ended without saying how.", type="job.bug", non_retryable=True)
        if end.phase is JobPhase.FAILED:
            raise ApplicationError(self._job.state.failure or end.reason, end, type="job.failed", non_retryable=True)
        if end.phase is JobPhase.CANCELLED and workflow.cancellation_reason() is not None:
            raise asyncio.CancelledError(end.reason)
        return end

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Waits; a cancellation of the workflow, from a client or the UI, cancels the job in order."""
        while not condition():
            try:
                await workflow.wait_condition(condition)
            except asyncio.CancelledError:
                reason = workflow.cancellation_reason()
                if reason is None or self._cancelled:
                    raise  # not asked for by anybody: the worker removes the workflow from its cache
                self._cancelled = True
                self._job.cancel = reason or "The workflow was cancelled."

    def _on_reset(self, _seed: int) -> None:
        """A reset gives the new run another seed at the very point that it goes back to."""
        self._job.reopen = "The workflow was reset."

    # -- signals --

    @workflow.signal(name=Signal.PLACEMENT.value, description="What the scheduler wants of the job.")
    def placement(self, directive: Directive) -> None:
        """Takes a directive; one that is delivered twice counts once."""
        job, state = self._job, self._job.state
        if directive.decision in state.seen or state.phase.ended:
            return
        keep_last(state.seen, directive.decision, KEPT_DECISIONS)
        job.admitted(directive)
        if directive.action == "lost":
            for node in directive.nodes:
                if node not in state.lost:
                    keep_last(state.lost, node, KEPT_LOST)
            job.decided(directive)
        elif directive.request == TELL_AGAIN:
            job.dirty = True
        elif directive.action == "admit":
            pass
        elif directive.action == "wait":
            state.waiting = directive.reason
            job.decided(directive)
        else:
            job.directives.append(directive)

    @workflow.signal(name=Signal.SHARING.value, description="What a node says of ranks that share a device.")
    def sharing(self, notice: SharingNotice) -> None:
        """Tells incidents among them; what comes twice counts once."""
        if not self._job.state.phase.ended:
            sharing.noticed(self._job, notice)

    @workflow.signal(name=Signal.RENEW.value, description="Continue as new as soon as nothing is under way.")
    def renew(self) -> None:
        """An operator's tool, and a test's."""
        self._job.renew = True

    # -- queries --

    @workflow.query(name=Query.SHOW.value, description="The job as it stands.")
    def show(self) -> JobView:
        """The job as it stands."""
        return view(self._job)

    @workflow.query(name=Query.EXPLAIN.value, description="Why the job is where it is: decisions, newest last.")
    def explain(self) -> list[DecisionView]:
        """The decisions about the job and their reasons; the last one tells why it waits, where it does."""
        state = self._job.state
        found = list(state.decisions)
        if state.waiting and not state.phase.ended:
            found.append(DecisionView(workflow.now(), "waits", state.waiting))
        return found

    # -- updates --

    @workflow.update(name=Update.PREEMPT.value, description="Suspend the job and hold it until `resume`.")
    async def preempt(self, request: Any = None) -> OperationResult:
        """Checkpoint, give up the devices, hold."""
        asked = await self._line.turn(PreemptRequest, request, self._may_preempt)
        return await self._ask(Request("preempt", asked.reason or "A person preempted it."), wait=asked.wait)

    @preempt.validator
    def _accept_preempt(self, request: Any = None) -> None:
        self._line.accept(PreemptRequest, request, self._may_preempt)

    def _may_preempt(self, _: PreemptRequest) -> None:
        self._not_ended()
        self._no_backlog()
        if self._job.state.held:
            raise refusal("The job is held already.")

    @workflow.update(name=Update.RESUME.value, description="Let a held job go on.")
    async def resume(self, request: Any = None) -> OperationResult:
        """Let a held job go on as soon as there are devices."""
        asked = await self._line.turn(ResumeRequest, request, self._may_resume)
        answer = await self._ask(Request("resume", asked.reason or "A person resumed it."), wait=True)
        if not asked.wait:
            return answer
        state = self._job.state
        await workflow.wait_condition(
            lambda: (
                state.phase is JobPhase.RUNNING or state.phase.ended or state.held or driver.renewal_wanted(self._job)
            )
        )
        return OperationResult(state.phase, f"The job is {state.phase}.", state.checkpoint)

    @resume.validator
    def _accept_resume(self, request: Any = None) -> None:
        self._line.accept(ResumeRequest, request, self._may_resume)

    def _may_resume(self, _: ResumeRequest) -> None:
        self._not_ended()
        state = self._job.state
        if not state.held and not any(other.kind == "preempt" for other in self._asked()):
            raise refusal(f"The job is not held by a person: it is {state.phase}. {state.waiting}".strip())

    @workflow.update(name=Update.CHECKPOINT.value, description="Take a checkpoint while the job runs on.")
    async def checkpoint(self, request: Any = None) -> OperationResult:
        """Take a checkpoint while the job runs on."""
        asked = await self._line.turn(CheckpointRequest, request, self._may_checkpoint)
        return await self._ask(Request("checkpoint", asked.reason), wait=asked.wait)

    @checkpoint.validator
    def _accept_checkpoint(self, request: Any = None) -> None:
        self._line.accept(CheckpointRequest, request, self._may_checkpoint)

    def _may_checkpoint(self, _: CheckpointRequest) -> None:
        self._running("kept in a checkpoint")

    @workflow.update(name=Update.MIGRATE.value, description='Go on at another node: {"to": NAME}.')
    async def migrate(self, request: Any = None) -> OperationResult:
        """Asks the scheduler for a place at the node, and goes on there."""
        wanted = await self._line.turn(MigrateRequest, request, self._may_migrate)
        job = self._job
        asked = Request("migrate", wanted.reason, to=wanted.to, id=str(workflow.uuid4()))
        job.moving, job.state.move = asked, MoveRequest(asked.id, wanted.to)
        job.dirty = True
        return await self._until_moved(asked, f"it moves to {wanted.to}", wait=wanted.wait)

    @migrate.validator
    def _accept_migrate(self, request: Any = None) -> None:
        self._line.accept(MigrateRequest, request, self._may_migrate)

    def _may_migrate(self, wanted: MigrateRequest) -> None:
        self._running("moved")
        self._not_moving()
        self._not_asked("resize")
        if wanted.to in {node.name for node in self._job.nodes}:
            raise refusal(f"The job runs at {wanted.to} already.")

    @workflow.update(name=Update.RESIZE.value, description='Go on on another number of devices: {"devices": K}.')
    async def resize(self, request: Any = None) -> OperationResult:
        """Looks whether the width can be had, asks the scheduler for the devices, and goes on on them."""
        wanted = await self._line.turn(ResizeRequest, request, self._may_resize)
        job = self._job
        asked = Request("resize", wanted.reason, id=str(workflow.uuid4()), width=wanted.devices)
        job.requests.append(asked)
        await workflow.wait_condition(lambda: asked.over or job.moving is asked or job.state.phase.ended)
        return await self._until_moved(asked, f"it goes on on {counted(wanted.devices, 'device')}", wait=wanted.wait)

    @resize.validator
    def _accept_resize(self, request: Any = None) -> None:
        self._line.accept(ResizeRequest, request, self._may_resize)

    def _may_resize(self, wanted: ResizeRequest) -> None:
        job, spec, width = self._job, self._job.spec, wanted.devices
        self._not_ended()
        if spec.pack == "node":
            count = spec.world_size
            raise refusal(
                f"The job starts its own ranks: it has its {counted(count, 'device')} for life and cannot be resized."
            )
        try:
            check_width(spec.world_size, width)
        except ModelError as error:
            raise refusal(str(error), error.code) from error
        if not spec.min_width <= width <= spec.widest:
            bounds = _between(spec.min_width, spec.widest)
            raise refusal(f"By `min_width` and `max_width` of its specification the job runs on {bounds}.")
        by_scheduler = job.moving is None and (job.state.move is not None or job.state.phase in _MOVED)
        if by_scheduler:  # the wish is looked at when that is done
            self._no_backlog()
        else:
            self._running("resized")
            self._not_moving()
        self._not_asked()
        if width == job.width == job.asked and not by_scheduler:
            raise refusal(answers.runs_there(job))

    @workflow.update(name=Update.CANCEL.value, description="End the job for good.")
    async def cancel(self, request: Any = None) -> OperationResult:
        """Stops the ranks; the job is cancelled."""
        asked = await self._line.turn(CancelRequest, request, self._may_still_cancel)
        state = self._job.state
        if not state.phase.ended:
            self._job.cancel = asked.reason or "A person cancelled it."
        if asked.wait or state.phase.ended:
            await workflow.wait_condition(lambda: state.phase.ended)
            said = f"The job is {state.phase}."
            if state.phase is not JobPhase.CANCELLED:
                said += f" Its ranks had ended by then{'; what they wrote is kept' if state.final else ''}."
            return OperationResult(state.phase, said, state.checkpoint)
        return OperationResult(state.phase, "It is being cancelled.", state.checkpoint)

    @cancel.validator
    def _accept_cancel(self, request: Any = None) -> None:
        self._line.accept(CancelRequest, request, self._may_cancel)

    def _may_cancel(self, _: CancelRequest) -> None:
        self._not_ended()

    def _may_still_cancel(self, wanted: CancelRequest) -> None:
        if not self._job.state.phase.ended:
            self._may_cancel(wanted)

    # -- helpers of handlers --

    async def _ask(self, request: Request, *, wait: bool) -> OperationResult:
        job = self._job
        job.requests.append(request)
        if not wait:
            return OperationResult(job.state.phase, f"Accepted: {request.kind}.", job.state.checkpoint)
        await workflow.wait_condition(lambda: request.over or job.state.phase.ended)
        if request.refused is not None:
            raise refusal(request.refused.message, request.refused.code)
        return request.result or OperationResult(job.state.phase, f"The job is {job.state.phase}.")

    async def _until_moved(self, asked: Request, agreed: str, *, wait: bool) -> OperationResult:
        """Until the scheduler has answered a request to move or to be resized; with `wait`, until that is done."""
        job = self._job
        try:
            await workflow.wait_condition(
                lambda: asked.over or asked.accepted or job.state.phase.ended,
                timeout=ANSWER,
                timeout_summary="until the scheduler answers",
            )
        except TimeoutError:
            driver.refuse(asked, f"The scheduler has not answered within {ANSWER.seconds} s: look after its worker.")
        if job.state.phase.ended:
            driver.refuse(asked, f"The job is {job.state.phase}.")
        if asked.accepted and wait:
            await workflow.wait_condition(lambda: asked.over or job.state.phase.ended)
        if asked.refused is not None:
            self._withdraw(asked)
            raise refusal(asked.refused.message, asked.refused.code)
        if asked.result is not None:
            return asked.result
        return OperationResult(job.state.phase, f"The scheduler agrees: {agreed}.")

    def _withdraw(self, request: Request) -> None:
        if self._job.moving is request:
            self._job.moving, self._job.state.move = None, None
            self._job.dirty = True

    def _asked(self) -> list[Request]:
        """What persons have asked for, and is not done."""
        return [request for request in (*self._job.requests, self._job.doing) if request is not None]

    def _not_asked(self, kind: str = "") -> None:
        for request in self._asked():
            if kind in ("", request.kind):
                raise refusal(f"The job is asked to {request.kind} already: ask again when that is done.")

    def _not_moving(self) -> None:
        if why := answers.under_way(self._job):
            raise refusal(why)

    def _not_ended(self) -> None:
        if self._fault or self._job.state.phase.ended:
            raise refusal(f"The job is {self._job.state.phase}: nothing can be asked of it any more.")
        if self._job.cancel:
            raise refusal("The job is being cancelled.")

    def _no_backlog(self) -> None:
        if why := outbox.refusal(self._job.state.outbox, workflow.now()):
            raise refusal(why)

    def _running(self, what: str) -> None:
        self._not_ended()
        self._no_backlog()
        if self._job.state.phase is not JobPhase.RUNNING:
            raise refusal(answers.not_running(self._job, what))
        if why := answers.on_its_way_out(self._job, what):
            raise refusal(why)


def _between(least: int, most: int) -> str:
    return counted(most, "device") if least == most else f"{least} to {most} devices"


def _id_of(workflow_id: str) -> JobId:
    """The id of a job that is shown only, for its faults."""
    try:
        return JobId(workflow_id)
    except ModelError:
        return JobId("invalid")


def _parsed(spec: Any, *, begun: bool) -> JobSpec:
    """The specification; a job that a build of before has begun keeps widths that are refused by now."""
    try:
        return parse_submitted_spec(spec)
    except ModelError as error:
        if error.code == UNEVEN and (begun or not workflow.patched("even-widths")):
            return parse_job_spec(spec)
        raise


def _faults(workflow_id: str, spec: Any) -> str:
    """All that is wrong with how the workflow was started, in one message."""
    found: list[str] = []
    for check in (lambda: JobId(workflow_id), lambda: parse_submitted_spec(spec)):
        try:
            check()
        except ModelError as error:
            found.append(str(error))
    return "\n".join(found)
