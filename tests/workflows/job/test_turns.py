"""Updates that one task of a job's workflow brings: each is done, or refused, as if it had come after the others."""

from __future__ import annotations

import asyncio

import pytest
from temporalio.client import WorkflowUpdateFailedError

from model.job_state import JobPhase
from model.names import Update
from model.requests import PreemptRequest
from tests.workflows.job.fleet import Fleet, Handle, ends, reset, until
from tests.workflows.job.test_cold_updates import replayed

PREEMPT = (Update.PREEMPT, {})
RESUME = (Update.RESUME, {})
CHECKPOINT = (Update.CHECKPOINT, {"wait": True})
MIGRATE = (Update.MIGRATE, {"to": "node-2", "wait": True})
RESIZE = (Update.RESIZE, {"devices": 1, "wait": True})
CANCEL = (Update.CANCEL, {})


async def _at_once(job: Handle, *updates: tuple[Update, dict]) -> list[str]:
    """Sends all while no worker of jobs is there; returns what they are refused with, empty where they are done."""
    fleet = job.fleet
    await job.quiet()
    await fleet.stop_worker("job")
    asked = []
    for update in updates:
        asked.append(asyncio.ensure_future(job.workflow.execute_update(*update)))
        await asyncio.sleep(0.2)  # the server says nothing before a worker does: their order is that of sending
    await fleet.start_job_worker()
    agreed: set[str] = set()

    async def answered() -> bool:
        wishes = [one for one in fleet.notices if one.job == job.id and one.request not in agreed]
        for wish in wishes:
            if wish.wants in ("move", "resize"):
                agreed.add(wish.request)
                resized = wish.wants == "resize"
                node = fleet.nodes[0 if resized else 2]
                at = [node.device(0)] if resized else [node.device(0), node.device(1)]
                await job.direct("resize" if resized else "migrate", *at, request=wish.request, ranks=2)
        return all(one.done() for one in asked)

    await until(answered, "answers")
    return [await _refusal(one) for one in asked]


async def _refusal(asked: asyncio.Future) -> str:
    try:
        await asked
    except WorkflowUpdateFailedError as error:
        return str(error.cause)
    return ""


@pytest.mark.parametrize(
    ("updates", "words", "ends_in"),
    [
        pytest.param((PREEMPT, RESUME), ("", ""), JobPhase.QUEUED, id="preempt, resume"),
        pytest.param(
            (RESUME, PREEMPT), ("not held", ""), JobPhase.SUSPENDED, id="resume, preempt", marks=pytest.mark.slow
        ),
        pytest.param(
            (PREEMPT, RESUME, PREEMPT, RESUME, RESUME),
            ("", "", "", "", ""),
            JobPhase.QUEUED,
            id="to and fro",
        ),
        pytest.param(
            (CHECKPOINT, PREEMPT), ("", ""), JobPhase.SUSPENDED, id="checkpoint, preempt", marks=pytest.mark.slow
        ),
        pytest.param(
            (RESIZE, RESIZE),
            ("", "asked to resize already"),
            JobPhase.RUNNING,
            id="resize, resize",
            marks=pytest.mark.slow,
        ),
        pytest.param((RESIZE, MIGRATE), ("", "asked to resize already"), JobPhase.RUNNING, id="resize, migrate"),
        pytest.param(
            (MIGRATE, RESIZE), ("", "asked to move to node-2 already"), JobPhase.RUNNING, id="migrate, resize"
        ),
        pytest.param(
            (CHECKPOINT, RESIZE), ("", "asked to checkpoint already"), JobPhase.RUNNING, id="checkpoint, resize"
        ),
        pytest.param((CANCEL, CANCEL), ("", "being cancelled"), JobPhase.CANCELLED, id="cancel, cancel"),
        pytest.param(
            (CANCEL, RESUME), ("", "being cancelled"), JobPhase.CANCELLED, id="cancel, resume", marks=pytest.mark.slow
        ),
    ],
)
async def test_updates_at_once_do_what_they_do_one_after_the_other(
    fleet: Fleet, updates: tuple[tuple[Update, dict], ...], words: tuple[str, ...], ends_in: JobPhase
) -> None:
    job = await fleet.submit(ranks=2)
    first = fleet.nodes[0]
    await job.run_on(first.device(0), first.device(1))
    await job.steps(first)
    refusals = await _at_once(job, *updates)
    assert all(word in why and bool(word) == bool(why) for word, why in zip(words, refusals, strict=True)), refusals
    view = await job.phase(ends_in)
    assert view.held == (ends_in is JobPhase.SUSPENDED)
    await replayed(job)
    if ends_in is JobPhase.RUNNING:
        await ends(job)
        await replayed(job)


async def test_a_reset_that_a_worker_hears_of_later_brings_a_preemption_and_its_end_at_once(fleet: Fleet) -> None:
    job = await fleet.submit()
    node = fleet.nodes[0]
    await job.run_on(node.device(0))
    await job.steps(node)
    before = len((await job.workflow.fetch_history()).events)
    await job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=True))
    await job.workflow.execute_update(Update.RESUME)
    finished = [
        event.event_id
        for event in (await job.workflow.fetch_history()).events[:before]
        if event.HasField("workflow_task_completed_event_attributes")
    ]
    await fleet.stop_worker("job")
    await reset(fleet.client, job, task=len(finished) - 1)
    await fleet.start_job_worker()
    job = Handle(fleet, fleet.client.get_workflow_handle(job.id))
    await job.notice(lambda notice: notice.generation == 2 and notice.wants == "devices")
    view = await job.run_on(fleet.nodes[1].device(0))
    assert not view.held
    await ends(job)
