"""Control activities of a job over the fleet's real store."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.job import JobActivities
from events.envelope import to_json
from events.types import JobPhaseChanged, JobPhaseChangedData
from model.control import AdvanceHeadInput, AllocateEpochInput, AwaitJobsInput, OpenJobInput, PublishInput
from model.ids import Epoch, EventId, Generation, JobId, NodeId, Step, TenantId
from model.ids import Sequence as Number
from model.job_state import JobPhase
from proxy_runtime.storage.blobs import Bucket
from proxy_runtime.storage.fleet import FleetStore
from tests.workflows.job.fleet import Sink

JOB, TENANT = JobId("a-job"), TenantId("default")
NODE = NodeId("node-1", 1)


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def activities(tmp_path: Path, sink: Sink) -> JobActivities:
    store = FleetStore(Bucket.open(f"file://{tmp_path}"), b"s" * 32)
    return JobActivities(store, sink, cluster="berlin", search_attributes=lambda: ("ErgoTier",))


def _open(activities: JobActivities, run: str):
    return ActivityEnvironment().run(activities.open_job, OpenJobInput(JOB, TENANT, "first", run))


def _event(seq: int, generation: int = 1) -> str:
    return to_json(
        JobPhaseChanged(
            id=EventId(JOB, "first", Generation(generation), Number(seq)),
            source="/clusters/berlin",
            subject=JOB,
            time=datetime(2026, 11, 30, tzinfo=UTC),
            tenant=TENANT,
            epoch=Epoch(0),
            data=JobPhaseChangedData(before=None, after=JobPhase.QUEUED, reason="because", step=Step(0)),
        )
    ).decode()


def test_opening_gives_each_run_a_generation_once_and_tells_the_workers_settings(activities: JobActivities) -> None:
    first = _open(activities, "run-1")
    assert (first.generation, first.cluster, first.search_attributes) == (1, "berlin", ("ErgoTier",))
    assert _open(activities, "run-1") == first
    assert _open(activities, "run-2").generation == 2
    with pytest.raises(ApplicationError) as fenced:
        _open(activities, "run-1")
    assert fenced.value.type == "runtime.fenced" and fenced.value.non_retryable


def test_epochs_are_handed_out_to_the_run_that_has_the_job(activities: JobActivities) -> None:
    env = ActivityEnvironment()
    _open(activities, "run-1")
    epoch = env.run(activities.allocate_epoch, AllocateEpochInput(JOB, "run-1")).epoch
    advanced = env.run(activities.advance_head, AdvanceHeadInput(JOB, "run-1", epoch, (NODE,)))
    assert advanced.before == ()
    _open(activities, "run-2")
    for call, request in (
        (activities.allocate_epoch, AllocateEpochInput(JOB, "run-1")),
        (activities.advance_head, AdvanceHeadInput(JOB, "run-1", Epoch(1), (NODE,))),
    ):
        with pytest.raises(ApplicationError) as fenced:
            env.run(call, request)
        assert fenced.value.type == "runtime.fenced" and fenced.value.non_retryable


def test_only_the_run_that_holds_the_generation_publishes(activities: JobActivities, sink: Sink) -> None:
    env = ActivityEnvironment()
    _open(activities, "run-1")
    request = PublishInput(JOB, "run-1", Generation(1), (_event(1), _event(2)))
    assert env.run(activities.publish_events, request).published == 2
    assert [int(event.id.seq) for event in sink.events] == [1, 2]
    _open(activities, "run-2")
    with pytest.raises(ApplicationError) as fenced:
        env.run(activities.publish_events, request)
    assert fenced.value.type == "runtime.fenced" and fenced.value.non_retryable
    # Events of an earlier generation are published by the run that holds the newest: they keep their ids.
    env.run(activities.publish_events, PublishInput(JOB, "run-2", Generation(2), (_event(2), _event(1, 2))))
    assert [str(event.id) for event in sink.events[2:]] == ["a-job/first/1/2", "a-job/first/2/1"]


def test_an_outage_of_kafka_is_tried_again(activities: JobActivities, sink: Sink) -> None:
    _open(activities, "run-1")
    sink.down = True
    with pytest.raises(ApplicationError) as failure:
        ActivityEnvironment().run(activities.publish_events, PublishInput(JOB, "run-1", Generation(1), (_event(1),)))
    assert failure.value.type == "events.unreachable" and not failure.value.non_retryable


async def test_who_waits_for_another_job_is_tried_again_and_takes_no_place_meanwhile(tmp_path: Path) -> None:
    class Fates:
        closed_as: str | None = None

        async def ask(self, job: JobId) -> str | None:
            return self.closed_as

    fates = Fates()
    store = FleetStore(Bucket.open(f"file://{tmp_path}"), b"s" * 32)
    waiting = JobActivities(store, Sink(), cluster="berlin", fates=fates)
    request = AwaitJobsInput(JOB, ((JobId("another"), "completed"),))
    with pytest.raises(ApplicationError) as goes_on:
        await asyncio.wait_for(ActivityEnvironment().run(waiting.await_jobs, request), 10)
    assert goes_on.value.type == "job.waits" and not goes_on.value.non_retryable
    fates.closed_as = "completed"
    assert not (await ActivityEnvironment().run(waiting.await_jobs, request)).refused
    fates.closed_as = "failed"
    assert "but is failed" in (await ActivityEnvironment().run(waiting.await_jobs, request)).refused
