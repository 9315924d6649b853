"""Continue-as-new, reset, terminate, outages of Kafka and of workers, and long waits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from temporalio.client import WorkflowUpdateFailedError
from temporalio.testing import WorkflowEnvironment

from events.types import JobPhaseChanged
from infra.job_worker import RegisteredAttributes
from model.job_state import JobPhase
from model.names import SearchAttribute, Signal, Update
from model.requests import PreemptRequest
from model.runtime import Outcome
from tests.workflows.job.fleet import Fleet, Handle, ends, reset, until


async def _renew(job: Handle) -> None:
    before = (await job.workflow.describe()).run_id
    await job.workflow.signal(Signal.RENEW)

    async def renewed() -> bool:
        return (await job.workflow.describe()).run_id != before

    await until(renewed, "a new run")


async def test_continue_as_new_disturbs_no_step(fleet: Fleet) -> None:
    job = await fleet.submit()
    node = fleet.nodes[0]
    await job.run_on(node.device(0))
    await job.steps(node)
    part = node.part(job.id)
    stops = fleet.troubles.calls["stop"] + fleet.troubles.calls["barrier"]
    for count in (1, 2):
        await _renew(job)
        await until(lambda count=count: fleet.troubles.calls["attend.restored"] >= count, "it is attended again")
    await job.steps(node)
    assert node.part(job.id) is part and part.outcome is None
    assert fleet.troubles.calls["stop"] + fleet.troubles.calls["barrier"] == stops
    view = await job.show()
    assert view.phase is JobPhase.RUNNING and view.epoch == 1 and view.recoveries == 0
    await job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=True))
    await _renew(job)
    await job.workflow.execute_update(Update.RESUME)
    await job.run_on(fleet.nodes[1].device(0))
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    events = job.check()
    assert len({event.id.first_execution_run for event in events}) == 1
    assert [e.data.before for e in events if isinstance(e, JobPhaseChanged)].count(None) == 1


SOME_TASKS = (0, 3, 5, 10, 15, 18, 22, 26)
"""A job's story has some 36 tasks; at these it has been wrong before: what is sent again meets another job there."""


@pytest.mark.parametrize(
    "task",
    [None, -1] + [pytest.param(n, marks=() if n in SOME_TASKS else pytest.mark.slow) for n in range(40)],
)
async def test_a_reset_to_any_point_opens_the_job_again_and_doubles_no_epoch(fleet: Fleet, task: int | None) -> None:
    job = await fleet.submit()
    first, second, _ = fleet.nodes
    await job.run_on(first.device(0))
    await job.steps(first)
    await job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=True))
    await job.workflow.execute_update(Update.RESUME)
    await job.run_on(second.device(0))
    await job.steps(second)
    await job.workflow.execute_update(Update.CHECKPOINT, {"wait": True})
    head = fleet.records.head(job.id)
    assert head is not None and head.epoch == 2
    await reset(fleet.client, job, task=task)
    job = Handle(fleet, fleet.client.get_workflow_handle(job.id))
    notice = await job.notice(lambda notice: notice.generation == 2 and notice.wants == "devices")
    assert notice.devices == ()
    await until(lambda: not second.running(job.id), "what the head named has been stopped")
    view = await job.run_on(first.device(0))
    # A placement that the engine has sent again may have taken an epoch before the reset was seen.
    assert view.epoch >= 3 and view.step == head.step
    await job.steps(first)
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    job.check()


async def test_a_reset_to_before_the_start_tells_that_the_job_does_not_run(fleet: Fleet) -> None:
    job = await fleet.submit()
    node = fleet.nodes[0]
    await job.run_on(node.device(0))
    await job.steps(node)
    await reset(fleet.client, job, task=1)
    job = Handle(fleet, fleet.client.get_workflow_handle(job.id))

    def told() -> bool:
        found = [event for event in fleet.sink.of(job.id) if event.id.generation == 2]
        phases = [event for event in found if isinstance(event, JobPhaseChanged)]
        # What was not published yet at the point of the reset is of epoch 0, and dropped by readers.
        return any((e.data.before, e.data.after, e.epoch) == (None, JobPhase.QUEUED, 1) for e in phases)

    await until(told, "where the job is now is told, before anything else happens")
    await job.run_on(node.device(0))
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    job.check()


async def test_a_reset_in_the_middle_of_a_preemption(fleet: Fleet) -> None:
    job = await fleet.submit()
    node = fleet.nodes[0]
    await job.run_on(node.device(0))
    await job.steps(node)
    await job.workflow.execute_update(Update.CHECKPOINT, {"wait": True})
    fleet.troubles.want("checkpoint.write.full", "node.busy", times=2)
    await job.workflow.execute_update(Update.PREEMPT)
    await job.phase(JobPhase.SUSPENDING)
    await until(lambda: fleet.troubles.calls["checkpoint.write.full"] >= 1, "the cut is under way")
    await reset(fleet.client, job, last=True)
    job = Handle(fleet, fleet.client.get_workflow_handle(job.id))
    await job.notice(lambda notice: notice.generation == 2 and notice.wants == "devices")
    view = await job.run_on(fleet.nodes[1].device(0))
    assert view.epoch == 2
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    job.check()


async def test_terminate_ends_the_ranks(fleet: Fleet) -> None:
    job = await fleet.submit()
    node = fleet.nodes[0]
    await job.run_on(node.device(0))
    fleet.fates.closed_as = "terminated"
    await job.workflow.terminate("in the UI")
    await until(lambda: not node.running(job.id), "the agent has noticed")


@pytest.mark.slow
async def test_without_kafka_a_job_runs_is_preempted_and_ends_but_stays_open(fleet: Fleet) -> None:
    fleet.sink.down = True
    job = await fleet.submit()
    node = fleet.nodes[0]
    await job.run_on(node.device(0))
    await job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=True))
    await job.workflow.execute_update(Update.RESUME)
    await job.run_on(node.device(1))
    await _renew(job)
    await job.end(Outcome.COMPLETED)
    view = await job.phase(JobPhase.COMPLETED)
    assert view.unpublished_events > 5 and fleet.sink.events == []
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(job.workflow.result(), 1)
    fleet.sink.down = False
    await job.workflow.result()
    assert len(job.check()) == view.unpublished_events


async def test_the_worker_of_jobs_goes_and_comes(fleet: Fleet) -> None:
    job = await fleet.submit()
    node = fleet.nodes[0]
    await job.run_on(node.device(0))
    await fleet.stop_worker("job")
    await job.steps(node)
    await fleet.start_job_worker()
    await job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=True))
    view = await job.show()
    assert view.phase is JobPhase.SUSPENDED and view.epoch == 1


async def test_updates_that_make_no_sense_are_refused_without_a_trace(fleet: Fleet) -> None:
    job = await fleet.submit()
    await job.notice(lambda notice: notice.wants == "devices")
    await job.quiet()
    length = (await job.workflow.describe()).history_length
    for update, argument, words in [
        (Update.RESUME, {}, "not held"),
        (Update.MIGRATE, {"to": "node-1"}, "queued"),
        (Update.CHECKPOINT, {}, "queued"),
        (Update.RESIZE, {"devices": 1}, "can be resized"),
        (Update.MIGRATE, {"too": "node-1"}, "to"),
    ]:
        with pytest.raises(WorkflowUpdateFailedError) as failure:
            await job.workflow.execute_update(update, argument)
        assert words in str(failure.value.cause), str(failure.value.cause)
    assert (await job.workflow.describe()).history_length - length < 5
    await job.workflow.cancel()


async def test_the_refusal_of_a_move_reaches_who_asked(fleet: Fleet) -> None:
    job = await fleet.submit()
    await job.run_on(fleet.nodes[0].device(0))
    asking = asyncio.create_task(job.workflow.execute_update(Update.MIGRATE, {"to": "node-9"}))
    notice = await job.notice(lambda notice: notice.wants == "move")
    await job.direct("refuse", request=notice.request)
    with pytest.raises(WorkflowUpdateFailedError) as failure:
        await asking
    assert "The test wants it to refuse." in str(failure.value.cause)
    await job.notice(lambda notice: notice.wants == "nothing")
    await job.workflow.cancel()


async def test_search_attributes_follow_the_job_where_they_are_registered(fleet: Fleet) -> None:
    registered = RegisteredAttributes(fleet.client)
    await registered.look()
    fleet.attributes = registered()
    assert set(fleet.attributes) == {str(attribute) for attribute in SearchAttribute}
    job = await fleet.submit(tier="basic")
    await job.run_on(fleet.nodes[1].device(0))

    async def shown() -> bool:
        found = dict((await job.workflow.describe()).search_attributes)
        return found.get("ErgoPhase") == ["running"] and found.get("ErgoNodes") == ["node-1"]

    await until(shown, "the attributes of a running job")
    found = (await job.workflow.describe()).search_attributes
    assert found["ErgoTier"] == ["basic"] and found["ErgoEpoch"] == [1] and found["ErgoWidth"] == [1]
    await job.workflow.cancel()


async def test_a_job_waits_for_forty_days_and_then_runs(skipping: WorkflowEnvironment, tmp_path: Path) -> None:
    async with Fleet(skipping.client, tmp_path).up() as fleet:
        job = await fleet.submit(checkpoint={"every_s": 60})
        await job.notice(lambda notice: notice.wants == "devices")
        await job.direct("wait")
        await skipping.sleep(40 * 24 * 3600)
        view = await job.show()
        assert view.phase is JobPhase.QUEUED and "wait" in view.waiting
        await job.run_on(fleet.nodes[0].device(0))
        await job.end(Outcome.COMPLETED)
        await job.workflow.result()
        job.check()


async def test_periodic_checkpoints_and_the_limit_of_device_time(fleet: Fleet) -> None:
    job = await fleet.submit(checkpoint={"every_s": 1}, device_time_limit_s=4)
    node = fleet.nodes[0]
    await job.run_on(node.device(0))
    await until(lambda: fleet.troubles.calls["checkpoint.commit.live"] >= 2, "two periodic checkpoints")
    view = await job.phase(JobPhase.FAILED)
    assert "device_time_limit_s" in view.failure and not node.running(job.id)


async def test_what_is_due_in_more_years_than_there_are_is_never_due(fleet: Fleet) -> None:
    job = await fleet.submit(checkpoint={"every_s": 10**18}, device_time_limit_s=10**18)
    await job.run_on(fleet.nodes[0].device(0))
    await job.phase(JobPhase.RUNNING)
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    job.check()


async def test_who_waits_for_a_resumption_holds_no_renewal_up(fleet: Fleet) -> None:
    job = await fleet.submit()
    await job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=True))
    waiting = asyncio.create_task(job.workflow.execute_update(Update.RESUME, {"wait": True}))
    await job.notice(lambda notice: notice.wants == "devices" and notice.number > 1)
    await _renew(job)
    assert (await waiting)["phase"] == "queued"
    await job.workflow.execute_update(Update.CANCEL, {"wait": True})
    await job.workflow.result()
    job.check()


@pytest.mark.parametrize("completes", [True, False])
async def test_a_job_that_comes_after_another_waits_for_its_end(fleet: Fleet, completes: bool) -> None:
    first = await fleet.submit()
    node = fleet.nodes[0]
    second = await fleet.submit(after=[{"job": first.id, "ended": "completed"}])
    notice = await second.notice(lambda notice: notice.phase is JobPhase.QUEUED)
    assert notice.wants == "nothing" and first.id in (await second.show()).waiting
    await first.run_on(node.device(0))
    await (first.end(Outcome.COMPLETED) if completes else first.end(Outcome.FAILED, 1))
    if completes:
        await second.run_on(node.device(0))
        await second.end(Outcome.COMPLETED)
        await second.workflow.result()
    else:
        view = await second.phase(JobPhase.FAILED)
        assert "but is failed" in view.failure
    second.check()


@pytest.mark.slow
async def test_jobs_that_wait_for_another_keep_the_worker_from_nothing(fleet: Fleet) -> None:
    first = await fleet.submit()
    for _ in range(33):  # one more than the worker does at a time
        waiting = await fleet.submit(after=[{"job": first.id, "ended": "any"}])
    await waiting.notice(lambda notice: notice.phase is JobPhase.QUEUED)
    await first.run_on(fleet.nodes[0].device(0))
    await ends(first)
    await waiting.run_on(fleet.nodes[0].device(0))


async def test_a_resume_may_follow_a_preemption_that_is_under_way(fleet: Fleet) -> None:
    job = await fleet.submit()
    node = fleet.nodes[0]
    await job.run_on(node.device(0))
    await job.steps(node)
    fleet.troubles.want("checkpoint.write.full", "node.busy", times=2)
    await job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=False))
    await job.phase(JobPhase.SUSPENDING)
    await job.workflow.execute_update(Update.RESUME)
    await job.notice(lambda notice: notice.wants == "devices" and not notice.held)
    await job.run_on(node.device(0))
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    job.check()
