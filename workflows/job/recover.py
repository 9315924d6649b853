"""After a loss: the rest is stopped and the job waits for devices, to go on from its newest checkpoint."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow

from model.control import OpenJobResult
from model.ids import NodeId
from model.job_state import JobPhase
from workflows.job import outbox, parts, start
from workflows.job.core import Job
from workflows.job.errors import Fenced, OperationFailed
from workflows.job.finish import fail
from workflows.job.preempt import account_parts

PROGRESS = timedelta(minutes=10)


async def recover(job: Job, why: OperationFailed) -> None:
    """From any phase with ranks to queued; failed, where the job has been started in vain too often."""
    state = job.state
    job.operation = "recover"
    state.stopped_at = workflow.now()
    await parts.end_epoch(job, f"recovery: {why.message}")
    account_parts(job)
    ran_out = exhausted(job)
    job.give_up_running_time()
    if ran_out:
        await fail(job, f"{_in_vain(job)} Last: {why.message}", keep=False)
        return
    state.placement, job.parts = None, {}
    state.recoveries += 1
    state.waiting = f"It is to go on from its newest checkpoint. {why.message}"
    job.transition(JobPhase.QUEUED, why.message)


async def failed_start(job: Job, why: OperationFailed) -> None:
    """A start went wrong and the job is queued again; failed, where that has happened too often."""
    if job.state.phase is JobPhase.QUEUED and exhausted(job):
        await fail(job, f"{_in_vain(job)} Last: {why.message}", keep=False)


def exhausted(job: Job) -> bool:
    """Counts a restart; whether there have been too many in a row without a step of progress.

    Of a script that takes no steps, a checkpoint that was committed since the restart before is progress.
    """
    state = job.state
    since = state.running_since
    # A lost node tells no step: having run for long counts as progress.
    ran = since is not None and workflow.now() - since > PROGRESS
    progress = ran or state.step > max(state.restart_step, 0)
    if not progress and state.step == 0 and state.checkpoints and workflow.patched("kept-is-progress"):
        progress = state.restarted_at is None or state.checkpoints[-1].time > state.restarted_at
    state.restarted_at = workflow.now()
    state.restarts = 0 if progress else state.restarts + 1
    state.restart_step = int(state.step)
    return state.restarts > job.spec.retries.no_progress


def _in_vain(job: Job) -> str:
    return f"It was started {job.state.restarts} times in a row without a step of progress."


async def open_first(job: Job) -> None:
    """Begins a run of the workflow: a new generation, and what the record says."""
    truth = await _opened(job)
    state = job.state
    fresh = not state.told
    _generation(job, truth.generation)
    if fresh:
        state.told = True
        state.epoch, state.checkpoint, state.step = truth.epoch, truth.checkpoint, truth.step
        state.unstopped = truth.nodes
        job.first_event("It was submitted.")
    elif truth.epoch != state.epoch:
        job.reopen = "The record knows another epoch than the run before this one."
    elif state.phase is JobPhase.RUNNING:
        # What runs is attended again; a part that is not there is a loss, never a second start.
        parts.attend(job, "restored")
    job.show()
    job.dirty = True


async def reopen(job: Job) -> None:
    """What this run believed is out of date: a reset, or a run that came back. The record decides.

    Whatever its epoch has on nodes is stopped, and the job waits to go on from the record's checkpoint.
    """
    state, why = job.state, job.reopen
    job.operation = "open the record again"
    workflow.logger.warning("job %s: %s", state.job, why)
    truth = await _opened(job)
    job.reopen = ""
    job.directives.clear()  # decided about another run; the scheduler is told how the job stands, and decides anew
    _generation(job, truth.generation)
    placed: tuple[NodeId, ...] = job.nodes
    epoch = max(truth.epoch, state.epoch)
    state.unstopped = await parts.stop_all(job, (*truth.nodes, *placed, *state.unstopped), epoch, why)
    state.stopped_epoch = epoch
    state.epoch, state.checkpoint, state.step = truth.epoch, truth.checkpoint, truth.step
    state.checkpoint_nodes = truth.nodes
    state.placement, job.parts = None, {}
    state.move, job.moving = None, None
    state.waiting = "Its workflow was set back; it goes on from what its record says."
    if state.phase in (JobPhase.QUEUED, JobPhase.SUSPENDED):
        # What this run had not told, or had told before it was set back, may be of an epoch that readers drop.
        job.note("reopened", why)
        job.first_event(why)
    else:
        state.recoveries += 1
        job.transition(JobPhase.QUEUED, why)
    job.dirty = True


async def reopen_ended(job: Job) -> None:
    """A run that was set back after the job's end only publishes what is left, in a generation of its own."""
    truth = await _opened(job)
    job.reopen = ""
    _generation(job, truth.generation)
    job.dirty = True


async def _opened(job: Job) -> OpenJobResult:
    """The record; while another run holds it that is newer than this one, this one can only wait for its end."""
    attempt = 0
    while True:
        try:
            return await start.open_record(job)
        except Fenced as error:
            # After a reset the first attempt may still be one in the name of a former run: tried again at once.
            attempt += 1
            if attempt > 1:
                job.note("fenced", error.message)
                await workflow.sleep(timedelta(seconds=30), summary="a newer run has the job")


def _generation(job: Job, generation: int) -> None:
    state, job.opened = job.state, True
    if generation != state.generation:
        state.generation = type(state.generation)(generation)
        state.notice = 0
        outbox.new_generation(state.outbox)
