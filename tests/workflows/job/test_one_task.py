"""What a job hears at once, in one task of a new worker: the history that comes of it can be replayed."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from temporalio.api.enums.v1 import EventType

import workflows.job
from model.runtime import Outcome
from tests.workflows.job.fleet import Fleet
from tests.workflows.job.test_cold_updates import replayed
from workflows.job.patches import PATCHES


async def test_its_ranks_have_ended_when_a_checkpoint_is_due(fleet: Fleet) -> None:
    """Both are there when a worker takes it over: the end counts, and no checkpoint is begun."""
    job = await fleet.submit(ranks=2, checkpoint={"every_s": 3})
    nodes = fleet.nodes[:2]
    await job.run_on(*(node.device(0) for node in nodes))
    await job.steps(nodes[0])
    await job.steps(nodes[1])
    await fleet.stop_worker("job")
    before = fleet.troubles.calls["barrier"]
    for node in nodes:
        node.part(job.id).end(Outcome.COMPLETED)
    await asyncio.sleep(4)
    await fleet.start_job_worker()
    await job.workflow.result()
    assert fleet.troubles.calls["barrier"] == before
    await replayed(job)
    job.check()


async def test_what_an_older_build_did_otherwise_is_asked_in_the_first_task_only(fleet: Fleet) -> None:
    job = await fleet.submit()
    await job.run_on(fleet.nodes[0].device(0))
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    kinds = [event.event_type for event in (await job.workflow.fetch_history()).events]
    tasks = [index for index, kind in enumerate(kinds) if kind == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED]
    markers = [index for index, kind in enumerate(kinds) if kind == EventType.EVENT_TYPE_MARKER_RECORDED]
    assert len(markers) == len(PATCHES) + 1 and max(markers) < tasks[1]


def test_all_of_them_are_listed() -> None:
    sources = "".join(path.read_text() for path in Path(workflows.job.__file__).parent.glob("*.py"))
    asked = set(re.findall(r'patched\("([a-z0-9-]+)"\)', sources)) | set(re.findall(r'^_PATCH = "(.+)"', sources, re.M))
    assert asked == {*PATCHES, "update-turn"}
