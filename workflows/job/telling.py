"""Two coroutines that tell others of the job as long as its workflow runs: its events, and its state."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Literal

from temporalio import workflow
from temporalio.common import RetryPolicy

from model.control import AwaitJobsInput, AwaitJobsResult, Demand, JobNotice, NotifyInput, PublishInput, PublishResult
from model.ids import JobId
from model.job_state import JobPhase
from model.names import CLUSTER_TASK_QUEUE, JOB_TASK_QUEUE, Activity
from model.splicing import widths
from model.units import counted
from workflows.job import outbox
from workflows.job.calls import FOREVER, control, told
from workflows.job.core import Job
from workflows.job.errors import Fenced, Interrupted, OperationFailed
from workflows.job.migrate import check_resize


async def publish(job: Job) -> None:
    """Publishes events in order, one activity at a time, for ever."""
    state = job.state
    while True:
        await workflow.wait_condition(lambda: bool(state.outbox.unpublished and job.opened and not job.reopen))
        events = outbox.next_batch(
            state.outbox,
            job=state.job,
            tenant=job.spec.tenant,
            first_run=state.first_run,
            generation=state.generation,
            cluster=state.cluster,
            now_at=workflow.info().get_current_history_length(),
        )
        if not events:
            continue
        request = PublishInput(state.job, workflow.info().run_id, state.generation, events)
        count = len(events)
        story = f"publish {counted(count, 'event')}"
        try:
            told = workflow.patched("publish-told")
            await control(job, Activity.PUBLISH, request, PublishResult, story=story, patient=True, heard_out=told)
        except Fenced as error:
            # Nobody has them under these ids by us: the run that holds the generation may use the ids itself.
            outbox.renumber(state.outbox)
            job.reopen = job.reopen or f"Another run of the workflow has the job: {error.message}"
        except Interrupted as error:
            # A reset: what was sent again is handled before the workflow hears of it, in the same task, whose calls
            # nobody has seen, or in the one before, whose calls are refused. The former run may have used these ids
            # for other events.
            if state.outbox.numbered_at == error.since or isinstance(error.failure, Fenced):
                outbox.renumber(state.outbox)
        else:
            outbox.published(state.outbox, workflow.now())
            if not state.outbox.unpublished:
                job.show()


async def notify(job: Job) -> None:
    """Tells the scheduler how the job stands, whenever that has changed: the whole state, the latest only."""
    state = job.state
    while True:
        await workflow.wait_condition(lambda: bool(job.dirty and job.opened and not job.reopen))
        job.dirty = False
        job.telling = True
        state.notice += 1
        await told(
            Activity.NOTIFY,
            NotifyInput(state.cluster, notice(job)),
            queue=CLUSTER_TASK_QUEUE,
            story=f"tell the scheduler: {state.phase}",
        )
        job.telling = False


async def await_others(job: Job) -> None:
    """Waits for the jobs that this one comes `after`; until then it wants nothing of the scheduler."""
    state = job.state
    if state.cleared or not job.spec.after:
        return
    after: tuple[tuple[JobId, Literal["completed", "any"]], ...]
    after = tuple((other.job, other.ended) for other in job.spec.after)
    names = ", ".join(other for other, _ in after)
    state.waiting = f"It comes after {names}."
    result = await workflow.execute_activity(
        Activity.AWAIT_JOBS.value,
        AwaitJobsInput(state.job, after),
        result_type=AwaitJobsResult,
        task_queue=JOB_TASK_QUEUE,
        start_to_close_timeout=FOREVER,
        heartbeat_timeout=timedelta(seconds=30),
        retry_policy=RetryPolicy(maximum_interval=timedelta(seconds=10)),
        summary=f"wait for {names}"[:200],
    )
    job.doomed, state.cleared = result.refused, not result.refused
    state.waiting = "It waits for the scheduler's first answer."
    job.dirty = True


def notice(job: Job) -> JobNotice:
    """The job as the scheduler should see it."""
    state, spec, placement = job.state, job.spec, job.state.placement
    wants = "nothing"
    free = state.cleared or not spec.after
    if free and (state.phase is JobPhase.QUEUED or (state.phase is JobPhase.SUSPENDED and not state.held)):
        wants = "devices"
    move = state.move if state.phase is JobPhase.RUNNING else None
    if move is not None:
        wants = "resize" if move.width else "move"
    return JobNotice(
        job=state.job,
        generation=state.generation,
        number=state.notice,
        workflow_run=state.first_run,
        demand=Demand(
            name=spec.name,
            tenant=spec.tenant,
            tier=spec.tier,
            priority=spec.priority,
            ranks=spec.world_size,
            ranks_per_group=spec.devices_per_rank,
            min_width=spec.min_width,
            max_width=job.asked,
            submitted_at=state.submitted_at,
            accelerator=spec.accelerator,
            widths=_widths(job, job.asked),
            measured=state.parallelism is not None,
        ),
        phase=state.phase,
        epoch=state.epoch,
        devices=placement.devices if placement is not None else (),
        wants=wants,
        held=state.held,
        move_to=move.to if move is not None and not move.width else None,
        request=move.id if move is not None else "",
        width=move.width if move is not None else 0,
        since=state.since,
        delivered_ms=state.delivered_ms if state.since is not None else None,
    )


def _widths(job: Job, widest: int) -> tuple[int, ...]:
    """At which widths the job can go on, as far as is known: those that its last cut does not rule out."""
    spec, state = job.spec, job.state
    if spec.pack == "node" or spec.world_size == 1:
        return ()
    found: list[int] = []
    for width in widths(spec.world_size, spec.min_width, widest):
        try:
            check_resize(job, width)
        except OperationFailed:
            continue
        if width not in state.unfit:
            found.append(width)
    return tuple(found) if found[-1:] == [widest] else (*found, widest)


async def all_told(job: Job) -> None:
    """Until everybody knows how it ended."""
    await workflow.wait_condition(
        lambda: bool(job.reopen) or (not job.state.outbox.unpublished and not job.dirty and not job.telling)
    )


def begin(job: Job) -> list[asyncio.Task[None]]:
    """Starts them."""
    return [asyncio.create_task(publish(job)), asyncio.create_task(notify(job)), asyncio.create_task(await_others(job))]
