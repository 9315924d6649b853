"""The ends of a job: completed, failed, cancelled. Its directory is kept as it is then."""

from __future__ import annotations

from model.job_state import JobPhase
from model.requests import JobEnd
from model.runtime import Outcome
from workflows.job import checkpoint, parts
from workflows.job.core import Job
from workflows.job.errors import OperationFailed
from workflows.job.preempt import account_parts

CANCEL_GRACE_S = 5.0
"""Between the polite signal to a cancelled job's ranks and the other."""


async def complete(job: Job) -> None:
    """Every rank has exited with 0.

    Raises:
        OperationFailed: see `checkpoint.final`.
    """
    job.operation = "finish"
    account_parts(job)
    job.state.exit_code = 0
    lost = await checkpoint.final(job, checkpoint.completed_nodes(job))
    await parts.stop_all(job, job.nodes, job.state.epoch, "the job is completed")
    reason = "Every rank has exited with 0."
    if lost:
        reason += f" Its directory could not be kept: {lost}"
    _end(job, JobPhase.COMPLETED, reason)


async def program_failed(job: Job) -> None:
    """A rank exited with another code: again, where the job asks for it, else failed."""
    state = job.state
    job.operation = "finish"
    state.exit_code, state.failure = parts.failure_of(job, parts.ended(job, Outcome.FAILED))
    if state.failures < job.spec.retries.failure:
        state.failures += 1
        await parts.end_epoch(job, "the program failed; it is started again")
        account_parts(job)
        state.placement, job.parts, state.exit_code = None, {}, None
        state.waiting = "It is to be started again after a failure."
        count = f"retry {state.failures} of {job.spec.retries.failure}"
        job.transition(JobPhase.QUEUED, f"The program failed; this is {count}. {first_line(state.failure)}")
        return
    await fail(job, state.failure, keep=True)


async def fail(job: Job, why: str, *, keep: bool) -> None:
    """Ends the job as failed; with `keep`, the directory of nodes whose ranks have ended is kept."""
    account_parts(job)
    done = checkpoint.completed_nodes(job)
    rest = tuple(node for node in job.nodes if node not in done)
    await parts.stop_all(job, rest, job.state.epoch, "another part of the job failed", grace_s=0.0)
    if keep and done:
        try:
            lost = await checkpoint.final(job, done)
        except OperationFailed as error:
            if not checkpoint.gone(error):
                raise
            lost = error.message
        if lost:
            job.note("directory not kept", lost)
    await parts.stop_all(job, done, job.state.epoch, "the job has failed")
    job.state.failure = why
    _end(job, JobPhase.FAILED, first_line(why))


async def cancel(job: Job) -> None:
    """Ends the job because a person wants it."""
    job.operation = "cancel"
    why = job.cancel
    await parts.end_epoch(job, why, grace_s=CANCEL_GRACE_S)
    account_parts(job)
    if job.unkept:
        why += f" Its ranks had ended by then; their directory could not be kept: {job.unkept}"
    _end(job, JobPhase.CANCELLED, why)


def _end(job: Job, phase: JobPhase, reason: str) -> None:
    state = job.state
    state.placement, job.parts, state.waiting = None, {}, ""
    job.transition(phase, reason, exit_code=state.exit_code)
    state.end = JobEnd(phase, reason, state.step, state.exit_code, state.final)


def first_line(text: str) -> str:
    """The first line of a longer text, for a table."""
    return text.strip().splitlines()[0][:300] if text.strip() else "It failed."
