"""The commands against the real workflow of a job; no scheduler is there, so that it stays queued."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from activities.job import JobActivities
from infra.job_worker import job_worker
from model.job_state import JobPhase
from model.names import SearchAttribute
from tests.cli.conftest import DEADLINE_S


class Sink:
    """Takes events as a broker would."""

    def __init__(self):
        self.events = []

    def publish(self, events):
        self.events += events
        return len(events)


@pytest.fixture
async def real_worker(client, store):
    names = tuple(name.value for name in SearchAttribute)
    activities = JobActivities(store, Sink(), cluster="local", search_attributes=lambda: names)
    with ThreadPoolExecutor(32) as executor:
        async with job_worker(client, activities, executor):
            yield


@pytest.fixture
async def submitted(ergo, real_worker, client):
    found = await ergo("submit", "--no-upload", "--ranks", "2", "--tier", "basic", "-m", "http.server")
    job = found.out.strip()
    yield job
    try:
        await client.get_workflow_handle(job).terminate()
    except Exception:
        pass  # it has ended


async def phase(ergo, job):
    return json.loads((await ergo("show", job, "--json")).out)["phase"]


async def test_a_life_in_the_queue(ergo, submitted):
    fields = json.loads((await ergo("show", submitted, "--json")).out)
    assert (fields["id"], fields["tier"], fields["ranks"]) == (submitted, "basic", 2)
    assert fields["phase"] == "queued"
    assert fields["waiting"]
    assert "is queued" in (await ergo("explain", submitted)).out
    async with asyncio.timeout(DEADLINE_S):
        while submitted not in (await ergo("ps")).out:
            pass
    refused = await ergo("migrate", submitted, "--to", "node-9", code=1)
    assert refused.err.startswith("ergo: The fleet has no node.")
    refused = await ergo("checkpoint", submitted, code=1)
    assert refused.err.count("\n") == 1
    assert "queued" in refused.err
    refused = await ergo("resume", submitted, code=1)
    assert "not held" in refused.err
    refused = await ergo("resize", submitted, "--devices", "3", code=1)
    assert refused.err.count("\n") == 1
    assert "A job of 2 ranks cannot use 3 devices" in refused.err


async def test_holding_a_queued_job(ergo, submitted):
    assert (await ergo("preempt", submitted, "--wait")).code == 0
    fields = json.loads((await ergo("show", submitted, "--json")).out)
    assert (fields["phase"], fields["held"]) == ("suspended", True)
    again = await ergo("preempt", submitted, code=1)
    assert "held already" in again.err
    await ergo("resume", submitted)
    assert await phase(ergo, submitted) == "queued"


async def test_cancelling(ergo, submitted, client):
    done = await ergo("cancel", submitted, "--wait", "--reason", "not needed")
    assert "cancelled" in done.err
    assert await phase(ergo, submitted) == JobPhase.CANCELLED
    for command in ("cancel", "preempt", "migrate --to x", "checkpoint"):
        late = await ergo(*command.split(), submitted, code=1)
        assert late.err.count("\n") == 1
        assert "has ended" in late.err or "no node" in late.err


async def test_waiting_for_a_job_that_is_cancelled(ergo, real_worker):
    process = await ergo.start("submit", "--wait", "--no-upload", "-m", "http.server")
    async with asyncio.timeout(DEADLINE_S * 2):
        job = (await process.stdout.readline()).decode().strip()
        await ergo("cancel", job)
        _, err = await process.communicate()
    assert process.returncode == 130
    assert "cancelled" in err.decode()
