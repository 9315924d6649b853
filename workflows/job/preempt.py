"""Takes a job off its devices: checkpoint, stop, suspended."""

from __future__ import annotations

from model.job_state import JobPhase
from workflows.job import checkpoint, parts
from workflows.job.core import Job
from workflows.job.errors import OperationFailed


async def preempt(job: Job, reason: str, *, held: bool) -> None:
    """From running to suspended.

    Args:
        job: the job.
        reason: a sentence for people.
        held: until a person resumes it.

    Raises:
        OperationFailed: the job runs on.
    """
    state = job.state
    job.operation = "preempt"
    job.transition(JobPhase.SUSPENDING, reason)
    try:
        cut = await checkpoint.take(job, "full")
    except OperationFailed as error:
        runs_on(job, f"It was not preempted: {error.message}")
        raise
    await parts.end_epoch(job, f"preempted: {reason}")
    while state.unstopped:
        # Whoever hears of "suspended" may use the devices: it is not said before it is true.
        names = ", ".join(node.name for node in state.unstopped)
        state.waiting = f"It is stopped; {names} has not yet said that nothing of it is left."
        job.show()
        await parts.end_epoch(job, f"preempted: {reason}")
    account_parts(job)
    state.stopped_at = cut.stopped_at
    state.placement = None
    state.held = held
    state.preemptions += 1
    state.waiting = "A person has preempted it; `resume` lets it go on." if held else reason
    job.parts = {}
    job.transition(JobPhase.SUSPENDED, reason)


def runs_on(job: Job, why: str) -> None:
    """Back to running, where it still is; whoever called looks after its parts."""
    if not job.reopen and job.state.phase in (JobPhase.SUSPENDING, JobPhase.MOVING, JobPhase.RESIZING):
        job.transition(JobPhase.RUNNING, why)


def account_parts(job: Job) -> None:
    """Keeps the step that ended parts have told."""
    steps = [part.result.progress.step for part in job.parts.values() if part.result is not None]
    if steps:
        job.state.step = max(job.state.step, min(steps))
