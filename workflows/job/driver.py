"""What a job does next: one operation at a time, the most urgent first."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Literal

from temporalio import workflow

from model.control import Directive
from model.job_state import JobPhase
from model.requests import OperationResult
from model.runtime import Outcome, RuntimeCode
from model.units import counted
from workflows.job import answers, checkpoint, finish, parts, recover, start
from workflows.job.core import Job, Request, later
from workflows.job.errors import Fenced, Interrupted, NodeLost, OperationFailed
from workflows.job.migrate import migrate, prepare_resize
from workflows.job.outbox import refusal
from workflows.job.preempt import preempt
from workflows.job.state import MoveRequest

_NEVER = ("model.fit", "model.width")
"""Of a resize: another try at the same width would end the same."""

_IN_BETWEEN = (JobPhase.STARTING, JobPhase.SUSPENDING, JobPhase.MOVING, JobPhase.RESIZING)


async def drive(job: Job) -> Literal["ended", "renew"]:
    """Runs the job until it has ended, or until nothing is under way and the workflow should continue as new."""
    if not job.opened:
        await recover.open_first(job)
    while not job.state.phase.ended:
        await _until_due(job)
        if renewable(job):
            return "renew"
        await _guarded(job, _next(job))
        job.operation = ""
        job.show()
    for request in job.requests:
        refuse(request, f"The job is {job.state.phase}.")
    job.requests.clear()
    return "ended"


def renewable(job: Job) -> bool:
    """Whether this is a moment to continue as new: it is wanted, and nothing is under way or asked for."""
    busy = job.interrupted or job.requests or job.directives or job.moving is not None or _urgent(job)
    return renewal_wanted(job) and not busy and workflow.all_handlers_finished()


def renewal_wanted(job: Job) -> bool:
    """Whether the workflow should continue as new: handlers that only wait then answer with what they know."""
    return job.renew or workflow.info().is_continue_as_new_suggested()


async def _until_due(job: Job) -> None:
    def something() -> bool:
        return bool(job.interrupted or job.doomed or job.directives or job.requests or _urgent(job) or renewable(job))

    due = min((time for time in (_checkpoint_due(job), job.limit_at()) if time is not None), default=None)
    if due is None:
        # Directives and requests may change what is due, so that the wait is never longer than one of them.
        await workflow.wait_condition(something)
        return
    left = max(timedelta(milliseconds=1), due - workflow.now())
    try:
        await workflow.wait_condition(something, timeout=left, timeout_summary="until the next checkpoint or limit")
    except TimeoutError:
        await _heard()


async def _heard() -> None:
    """Whatever came in the same task as a timer counts first: which of them a worker is given first is not settled."""
    if workflow.patched("due-last"):
        for _ in range(2):  # a call's result, and what is made of it
            await workflow.wait_condition(lambda: True)


def _urgent(job: Job) -> bool:
    """Whether the parts, or the scheduler, have told something that ends the job's stay where it is."""
    if job.state.phase is not JobPhase.RUNNING:
        return False
    return parts.trouble(job) is not None or bool(parts.ended(job, Outcome.FAILED)) or _completed(job)


def _completed(job: Job) -> bool:
    return bool(job.parts) and len(parts.ended(job, Outcome.COMPLETED)) == len(job.parts)


def _too_late(job: Job) -> bool:
    """Whether all that is left to cancel are the files of ranks that have ended by themselves: these are kept."""
    if job.unkept or job.state.phase is not JobPhase.RUNNING or parts.trouble(job) is not None:
        return False
    return (_completed(job) or bool(parts.ended(job, Outcome.FAILED))) and workflow.patched("late-cancel")


def _checkpoint_due(job: Job) -> datetime | None:
    return job.state.checkpoint_due if job.state.phase is JobPhase.RUNNING else None


async def _next(job: Job) -> None:
    now = workflow.now()
    if job.reopen:
        await recover.reopen(job)
    elif job.cancel and not _too_late(job):
        await finish.cancel(job)
    elif job.doomed:
        await finish.fail(job, job.doomed, keep=False)
    elif _urgent(job):
        await _settle(job)
    elif (limit := job.limit_at()) is not None and now >= limit:
        await _limit_reached(job)
    elif job.requests:
        request = job.requests.pop(0)
        await (_prepared if request.kind == "resize" else _requested)(job, request)
    elif job.directives:
        await _directed(job, job.directives.pop(0))
    elif (due := _checkpoint_due(job)) is not None and now >= due:
        await _checkpoint(job, refusal(job.state.outbox, now))


async def _limit_reached(job: Job) -> None:
    """By the workflow's clock the device time is used up; whether the job has really run until now, its nodes know."""
    try:
        await checkpoint.take(job, "live")
    except OperationFailed as error:
        if isinstance(error, Interrupted | Fenced):
            raise
        if _urgent(job):
            return  # it has ended, or was lost before: what comes of that also says what was delivered
        if error.code == RuntimeCode.UNKNOWN:
            await recover.recover(job, error)
            return
        job.note("checkpoint not taken", error.message)
    seconds = job.spec.device_time_limit_s
    await finish.fail(job, f"Its device time of {seconds} s (`device_time_limit_s`) is used up.", keep=False)


async def _settle(job: Job) -> None:
    """The parts have told how they ended."""
    failed = parts.ended(job, Outcome.FAILED)
    trouble = parts.trouble(job)
    if failed and not isinstance(trouble, NodeLost | Fenced):
        # Ranks also fail when a peer's node is gone, long before its lease is over: the others are asked first.
        rest = tuple(node for node in job.nodes if node not in checkpoint.completed_nodes(job))
        silent = await parts.stop_all(job, rest, job.state.epoch, "another part of the job failed")
        gone = [*(node for node in rest if job.is_lost(node)), *silent]
        if gone:
            await recover.recover(job, NodeLost(gone[0]))
        else:
            await finish.program_failed(job)
    elif trouble is None:
        try:
            await finish.complete(job)
        except OperationFailed as error:
            if not checkpoint.gone(error):
                raise
            await recover.recover(job, error)
    elif trouble.code == RuntimeCode.FENCED:
        raise trouble
    else:
        await recover.recover(job, trouble)


async def _directed(job: Job, directive: Directive) -> None:
    phase, state = job.state.phase, job.state
    request = job.moving if job.moving is not None and directive.request == job.moving.id else None
    if directive.action == "refuse":
        job.decided(directive)
        if request is not None:
            _moved(job, request, OperationFailed(directive.reason, code="job.refused"))
        return
    moves = directive.action in ("migrate", "resize")
    if directive.notice and (directive.action == "place" or (moves and request is None)):
        decided_on, newest = (directive.generation, directive.notice), (state.generation, state.notice)
        if decided_on != newest or (moves and job.dirty):
            # The scheduler decides anew on the later notice, and may have given these devices away. That notice is
            # under way already: another one now would only outdate the next decision as well.
            job.note(f"{directive.action} not done", "It was decided before the job's newest notice.")
            return
    backlog = refusal(state.outbox, workflow.now())
    possible = {
        "place": phase is JobPhase.QUEUED or (phase is JobPhase.SUSPENDED and not state.held),
        "preempt": phase is JobPhase.RUNNING,
        "migrate": phase is JobPhase.RUNNING and (request is not None or state.move is None),
        "resize": phase is JobPhase.RUNNING and (request is not None or state.move is None),
    }
    if not possible.get(directive.action, False) or backlog:
        why = backlog or _impossible(job, moves=moves, asked=request is not None)
        job.note(f"{directive.action} not done", why)
        job.dirty = True  # the scheduler believes otherwise
        if request is not None:
            _moved(job, request, OperationFailed(why, code="job.refused"))
        return
    if request is not None and request.reason:
        directive = replace(directive, reason=f"{directive.reason} ({request.reason})")
    job.decided(directive)
    if directive.action == "place":
        try:
            await start.start(job, directive)
        except OperationFailed as error:
            if not isinstance(error, Interrupted | NodeLost | Fenced):
                await recover.failed_start(job, error)
            raise
    elif directive.action == "preempt":
        await preempt(job, directive.reason, held=False)
    else:
        if request is not None:
            request.accepted = True
        else:
            # As with a person's move: as long as it is under way, what the scheduler hears says so.
            where = ", ".join(dict.fromkeys(device.node.name for device in directive.devices))
            width = len(directive.devices) if directive.action == "resize" else 0
            state.move = MoveRequest(directive.request, "" if width else where, width)
            job.dirty = True
        try:
            await migrate(job, directive)
        except OperationFailed as error:
            if directive.action == "resize" and error.code in _NEVER:
                state.unfit = (*state.unfit, len(directive.devices))
            _moved(job, request, error)
            raise
        finally:
            if request is None:
                state.move, job.dirty = None, True
        _moved(job, request, None)


def _impossible(job: Job, *, moves: bool, asked: bool) -> str:
    """Why a directive cannot be done; where a person has `asked` for it, with what to do."""
    state = job.state
    if moves and state.phase is JobPhase.RUNNING:
        return answers.under_way(job) if asked else answers.comes_first(job)
    if moves and asked:
        return answers.not_running(job, "moved or resized")
    return f"The job is {state.phase}{' and held' if state.held else ''}."


async def _requested(job: Job, request: Request) -> None:
    state = job.state
    why = request.reason or "A person asked for it."
    job.doing = request
    try:
        if refused := refusal(state.outbox, workflow.now()):
            raise OperationFailed(refused, code="job.backlog")
        if request.kind == "preempt":
            await _hold(job, why)
            message = "It is suspended and held; `resume` lets it go on."
        elif request.kind == "resume":
            _release(job, why)
            message = "It waits for devices."
        else:
            if state.phase is not JobPhase.RUNNING:
                raise OperationFailed(answers.not_running(job, "kept in a checkpoint"))
            await _checkpoint(job)
            if request.reason:
                job.note("checkpoint", request.reason)
            message = f"Checkpoint {state.checkpoint} is committed."
    except OperationFailed as error:
        request.refused = error
        raise
    else:
        request.result = OperationResult(state.phase, message, state.checkpoint)
    finally:
        job.doing = None
        if not request.over:
            refuse(request, "It was not done, because of an error; the worker's log has it.")


async def _prepared(job: Job, request: Request) -> None:
    """A person's wish for another width goes to the scheduler, or is refused."""
    job.doing = request
    try:
        if refused := refusal(job.state.outbox, workflow.now()):
            raise OperationFailed(refused, code="job.backlog")
        await prepare_resize(job, request)
    except OperationFailed as error:
        request.refused = answers.advised(job, request, error)
        raise
    finally:
        job.doing = None
        if not request.over and job.moving is not request:
            refuse(request, "It was not done, because of an error; the worker's log has it.")


async def _hold(job: Job, why: str) -> None:
    state = job.state
    if state.phase is JobPhase.RUNNING:
        await preempt(job, why, held=True)
    elif state.phase in (JobPhase.QUEUED, JobPhase.SUSPENDED):
        state.held, state.waiting = True, "A person has preempted it; `resume` lets it go on."
        if state.phase is JobPhase.QUEUED:
            job.transition(JobPhase.SUSPENDED, why)
        else:
            job.first_event(why)  # the same phase, and its hour stands still from now on
    job.note("hold", why)


def _release(job: Job, why: str) -> None:
    job.state.held = False
    job.state.waiting = "It waits for devices."
    if job.state.phase is JobPhase.SUSPENDED:
        job.transition(JobPhase.QUEUED, why)
    job.note("resume", why)


async def _checkpoint(job: Job, backlog: str = "") -> None:
    every = job.spec.checkpoint.every_s
    if every is not None:
        job.state.checkpoint_due = later(workflow.now(), every)
    if backlog:
        job.note("checkpoint not taken", backlog)
        return
    await checkpoint.take(job, "live")


def _moved(job: Job, request: Request | None, error: OperationFailed | None) -> None:
    """Answers a person's request to move or to be resized."""
    if request is None:
        return
    job.moving, job.state.move = None, None
    job.dirty = True
    if error is None:
        done = f"It runs on {counted(job.width, 'device')}." if request.width else "It runs at its new place."
        request.result = OperationResult(job.state.phase, done, job.state.checkpoint)
    else:
        request.refused = answers.advised(job, request, error)


def refuse(request: Request, why: str) -> None:
    """Answers that it is not done."""
    if not request.over:
        request.refused = OperationFailed(why, code="job.refused")


async def _guarded(job: Job, operation: Awaitable[None]) -> None:
    """Whatever goes wrong in an operation, the workflow goes on and the job ends up in a phase that is true."""
    try:
        await operation
    except Fenced as error:
        job.reopen = job.reopen or error.message
    except Interrupted:
        return
    except OperationFailed as error:
        over = error.code == "job.over" and job.operation
        job.note(f"{job.operation.partition(':')[0]} not done" if over else "failed", error.message)
        await _true_phase(job, error)
    except Exception as error:
        workflow.logger.exception("job %s: an operation broke", job.state.job)
        job.note("failed", f"An error in the workflow: {error}")
        await _true_phase(job, OperationFailed(f"An error in the workflow: {error}", code="job.bug"))


async def _true_phase(job: Job, error: OperationFailed) -> None:
    """After a failed operation a job runs or waits; one that is left between is recovered."""
    job.dirty = True
    if job.state.phase not in _IN_BETWEEN or job.interrupted:
        return
    try:
        await recover.recover(job, error)
    except OperationFailed as second:
        workflow.logger.error("job %s: recovery failed: %s", job.state.job, second.message)
