"""What a job answers a person who asks for what cannot be done now: why, and what to do."""

from __future__ import annotations

from model.job_state import JobPhase
from model.runtime import Outcome
from model.units import counted
from workflows.job import parts
from workflows.job.core import Job, Request
from workflows.job.errors import Fenced, Interrupted, OperationFailed
from workflows.job.state import MoveRequest

_BETWEEN = (JobPhase.STARTING, JobPhase.SUSPENDING, JobPhase.MOVING, JobPhase.RESIZING)
_REFUSED = ("model.", "job.refused", "job.backlog", "job.same-", "job.not-placed", "job.over", "job.ending")
"""Codes of what was not begun: the sentence says all."""


def not_running(job: Job, what: str) -> str:
    """It is in another phase; `what` it cannot be: ``resized``, ``moved``."""
    state = job.state
    then = "`ergo resume` lets it go on; ask again when it runs." if state.held else "Ask again when it runs."
    return f"The job is {state.phase}: only a running one can be {what}. {then}"


def under_way(job: Job) -> str:
    """Somebody has asked for another place or width already; empty where nobody has."""
    move = job.state.move
    if move is None:
        return ""
    what = _wanted(move)
    if job.moving is not None:
        return f"The job is asked to {what} already: ask again when that is done."
    return f"The scheduler is about to have the job {what}: ask again when that is done."


def comes_first(job: Job) -> str:
    """Why the scheduler's own move or resize is not done: another one is under way."""
    move = job.state.move
    return "" if move is None else f"The job is about to {_wanted(move)}: that comes first."


def on_its_way_out(job: Job, what: str) -> str:
    """It has phase `running` still, but its ranks do not run on; empty where they do."""
    trouble = parts.trouble(job)
    if trouble is not None or job.operation == "recover":
        return f"{trouble.message if trouble else ''} The job is being recovered: ask again when it runs.".strip()
    why = parts.over(job)
    if not why:
        return ""
    if parts.ended(job, Outcome.FAILED) and job.state.failures < job.spec.retries.failure:
        return f"The job is started again: {why} Ask again when it runs."
    return f"The job is ending: {why} It cannot be {what} any more."


def runs_there(job: Job) -> str:
    """It has the width that is asked for, and asks for no other."""
    width = counted(job.width, "device")
    return f"The job runs on {width} already, and asks for no other number: there is nothing to do."


def advised(job: Job, request: Request, error: OperationFailed) -> OperationFailed:
    """A failed move or resize: where a step of it failed, what that means for the job and what was asked for."""
    if parts.trouble(job) is not None or job.state.phase in _BETWEEN:
        wish = f"on {counted(request.width, 'device')}" if request.width else f"at {request.to}"
        then = f"The job goes on from its newest checkpoint by itself, but not {wish}: ask again when it runs."
    elif job.state.phase is not JobPhase.RUNNING or parts.over(job) or not _step_failed(error):
        return error
    else:
        done = "resized" if request.width else "moved"
        then = f"The job was not {done}: it is on {counted(job.width, 'device')} as before. Ask again."
    return OperationFailed(f"{error.message} {then}", code=error.code)


def _wanted(move: MoveRequest) -> str:
    return f"run on {counted(move.width, 'device')}" if move.width else f"move to {move.to}"


def _step_failed(error: OperationFailed) -> bool:
    return not isinstance(error, Interrupted | Fenced) and not error.code.startswith(_REFUSED)
