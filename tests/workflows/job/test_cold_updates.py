"""An update that is the first thing a new worker hears of a job: the history that comes of it can be replayed.

The engine's SDK gives such an update together with what the job's last, empty task had brought, and the update first;
in every later replay it comes after that. A job must do the same in either order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from temporalio.worker import Replayer

from infra.converter import DATA_CONVERTER
from infra.job_worker import workflow_runner
from model.names import Update
from model.requests import MigrateRequest, ResizeRequest
from tests.workflows.job.fleet import Fleet, Handle, ends
from workflows.job import JobWorkflow


async def replayed(job: Handle) -> None:
    history = await job.workflow.fetch_history()
    replayer = Replayer(workflows=[JobWorkflow], data_converter=DATA_CONVERTER, workflow_runner=workflow_runner())
    await replayer.replay_workflow(history)


async def _resized(job: Handle, asked: Callable[[str, object], Awaitable[None]]) -> None:
    fleet = job.fleet
    await asked(Update.RESIZE, ResizeRequest(1, wait=True))
    notice = await job.notice(lambda notice: notice.wants == "resize")
    await job.direct("resize", fleet.nodes[0].device(0), request=notice.request, ranks=2)


async def _moved(job: Handle, asked: Callable[[str, object], Awaitable[None]]) -> None:
    target = job.fleet.nodes[2]
    await asked(Update.MIGRATE, MigrateRequest("node-2", wait=True))
    notice = await job.notice(lambda notice: notice.wants == "move")
    await job.direct("migrate", target.device(0), target.device(1), request=notice.request)


async def _kept(job: Handle, asked: Callable[[str, object], Awaitable[None]]) -> None:
    await asked(Update.CHECKPOINT, {"wait": True})


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(_resized, id="resize"),
        pytest.param(_moved, id="migrate", marks=pytest.mark.slow),
        pytest.param(_kept, id="checkpoint", marks=pytest.mark.slow),
    ],
)
async def test_an_update_wakes_a_job_at_a_new_worker(fleet: Fleet, operation) -> None:
    job = await fleet.submit(ranks=2)
    first = fleet.nodes[0]
    await job.run_on(first.device(0), first.device(1))
    await job.steps(first)
    await job.quiet()
    await fleet.stop_worker("job")
    answers: list[asyncio.Future] = []

    async def asked(update: str, request: object) -> None:
        answers.append(asyncio.ensure_future(job.workflow.execute_update(update, request)))
        await asyncio.sleep(0.3)
        await fleet.start_job_worker()

    await operation(job, asked)
    await answers[0]
    await replayed(job)
    await ends(job)
    await replayed(job)
