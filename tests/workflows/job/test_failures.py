"""Steps of operations that fail: the job runs on where it was, or it is recovered, and never twice."""

from __future__ import annotations

import threading

import pytest
from temporalio.client import WorkflowFailureError, WorkflowUpdateFailedError, WorkflowUpdateStage

from model.control import JobView
from model.ids import NodeId
from model.job_state import JobPhase
from model.names import Update
from model.requests import (
    CancelRequest,
    MigrateRequest,
    PreemptRequest,
)
from model.runtime import Outcome, RuntimeCode
from tests.workflows.job.fleet import Fleet, Handle, ends, refused, until
from workflows.job.checkpoint import CATCH_UP_S

_ACCEPTED = WorkflowUpdateStage.ACCEPTED


@pytest.mark.parametrize(
    "step", ["barrier.stop", "barrier.finish", "checkpoint.write.full", "checkpoint.commit.full", "node-1.barrier.stop"]
)
async def test_a_preemption_that_fails_before_its_commit_leaves_the_job_running(fleet: Fleet, step: str) -> None:
    job = await fleet.submit(ranks=2)
    first, second, _ = fleet.nodes
    await job.run_on(first.device(0), second.device(0))
    await job.steps(second)
    fleet.troubles.want(step, RuntimeCode.DEADLINE)
    why = await refused(job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=True)))
    assert "wants" in why
    view = await job.phase(JobPhase.RUNNING)
    assert view.epoch == 1 and not view.held and "not preempted" in view.transitions[-1].reason
    await job.steps(first)
    await job.steps(second)
    fleet.troubles.none()
    await job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=True))
    assert (await job.show()).phase is JobPhase.SUSPENDED
    await job.workflow.cancel()
    with pytest.raises(WorkflowFailureError):
        await job.workflow.result()
    job.check()


async def test_a_preemption_goes_through_when_stop_needs_some_attempts(fleet: Fleet) -> None:
    job = await fleet.submit()
    node = fleet.nodes[0]
    await job.run_on(node.device(0))
    fleet.troubles.want("stop", "node.busy", times=4)
    await job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=True))
    assert (await job.show()).phase is JobPhase.SUSPENDED and not node.running(job.id)


async def _move(job: Handle) -> tuple[str, JobView]:
    """Moves from node-0 to node-2; returns why it was refused."""
    target = job.fleet.nodes[2]
    asked = await job.workflow.start_update(
        Update.MIGRATE, MigrateRequest("node-2", wait=True), wait_for_stage=_ACCEPTED
    )
    notice = await job.notice(lambda notice: notice.wants == "move")
    await job.direct("migrate", target.device(0), request=notice.request)
    try:
        await asked.result()
    except WorkflowUpdateFailedError as error:
        return str(error.cause), await job.show()
    return "", await job.show()


@pytest.mark.parametrize(
    "step",
    [
        *("checkpoint.write.live", "checkpoint.commit.live", "transfer.ahead", "checkpoint.write.full"),
        *("checkpoint.commit.full", "transfer.last", "restore"),
    ],
)
async def test_a_move_that_fails_before_its_commit_leaves_the_job_at_the_source(fleet: Fleet, step: str) -> None:
    job = await fleet.submit()
    source, _, target = fleet.nodes
    await job.run_on(source.device(0))
    await job.steps(source)
    fleet.troubles.want(step, RuntimeCode.UNSUITABLE)
    why, view = await _move(job)
    assert "wants" in why
    view = await job.phase(JobPhase.RUNNING)
    assert view.epoch == 1 and view.placement == (source.device(0),) and view.moves == 0
    await job.steps(source)
    assert not target.running(job.id)
    fleet.troubles.none()
    why, view = await _move(job)
    assert why == "" and view.placement == (target.device(0),)
    await job.steps(target)
    assert not source.running(job.id)
    await ends(job)


async def test_a_job_is_preempted_while_its_ranks_are_being_started(fleet: Fleet) -> None:
    job = await fleet.submit()
    node = fleet.nodes[0]
    fleet.troubles.want("barrier.stop", RuntimeCode.STARTING, times=3)
    await job.run_on(node.device(0))
    await job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=True))
    view = await job.show()
    assert view.phase is JobPhase.SUSPENDED and view.preemptions == 1 and not node.running(job.id)
    assert not [decision for decision in view.decisions if decision.action == "failed"]


async def test_a_part_that_is_killed_before_its_directory_is_kept_is_recovered(fleet: Fleet) -> None:
    job = await fleet.submit()
    node = fleet.nodes[0]
    await job.run_on(node.device(0))
    fleet.troubles.want("checkpoint.write.final", RuntimeCode.UNKNOWN, times=1)
    await job.end(Outcome.COMPLETED)
    view = await job.phase(JobPhase.QUEUED)
    assert view.recoveries == 1
    await job.run_on(node.device(0))
    await ends(job)
    assert (await job.show()).final is not None


@pytest.mark.parametrize("step", ["checkpoint.write.final", "checkpoint.commit.final"])
async def test_a_directory_is_kept_as_soon_as_that_is_possible(fleet: Fleet, step: str) -> None:
    job = await fleet.submit()
    await job.run_on(fleet.nodes[0].device(0))
    fleet.troubles.want(step, RuntimeCode.DEADLINE, times=1)
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    view = await job.show()
    assert view.final is not None and view.recoveries == 0
    job.check()


async def test_a_job_that_is_cancelled_before_its_directory_is_kept_is_not_completed(fleet: Fleet) -> None:
    job = await fleet.submit()
    await job.run_on(fleet.nodes[0].device(0))
    fleet.troubles.want("checkpoint.write.final", RuntimeCode.DEADLINE)
    await job.end(Outcome.COMPLETED)
    await until(lambda: fleet.troubles.calls["checkpoint.write.final"], "it is tried")
    await job.workflow.execute_update(Update.CANCEL, CancelRequest(wait=True))
    view = await job.show()
    assert view.phase is JobPhase.CANCELLED and view.final is None
    assert "could not be kept: Node node-0, checkpoint" in view.transitions[-1].reason
    job.check()


@pytest.mark.parametrize(("outcome", "code", "phase"), [("COMPLETED", 0, "completed"), ("FAILED", 3, "failed")])
async def test_what_ranks_that_have_ended_wrote_is_kept_though_the_job_is_cancelled(
    fleet: Fleet, outcome: str, code: int, phase: str
) -> None:
    job = await fleet.submit()
    await job.run_on(fleet.nodes[0].device(0))
    hold = fleet.troubles.holds["checkpoint.write.final"] = threading.Event()
    await job.end(Outcome[outcome], code)
    await until(lambda: fleet.troubles.calls["checkpoint.write.final"], "it is being kept")
    cancelled = await job.workflow.start_update(Update.CANCEL, {"wait": True}, wait_for_stage=_ACCEPTED)
    hold.set()
    assert (await cancelled.result())["message"] == (
        f"The job is {phase}. Its ranks had ended by then; what they wrote is kept."
    )
    assert (await job.show()).final is not None
    job.check()


async def test_nodes_of_a_job_stop_at_the_step_of_the_first_one(fleet: Fleet) -> None:
    job = await fleet.submit(ranks=2)
    first, second, _ = fleet.nodes
    await job.run_on(first.device(0), second.device(0))
    await job.steps(first)
    await job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=True))
    ((leader, at),) = first.stops
    ((follower, _),) = second.stops
    assert leader.at_step is None and leader.prefer_step_s > CATCH_UP_S
    assert (follower.at_step, follower.prefer_step_s) == (at, CATCH_UP_S)


async def test_the_answer_of_the_commit_of_a_move_is_lost(fleet: Fleet) -> None:
    job = await fleet.submit()
    source, _, target = fleet.nodes
    await job.run_on(source.device(0))
    fleet.troubles.want("advance_head.answer", "store.unreachable", times=2)
    why, view = await _move(job)
    assert why == "" and view.placement == (target.device(0),)
    await job.steps(target)
    await ends(job)


async def test_a_part_that_is_gone_after_a_move_is_recovered(fleet: Fleet) -> None:
    job = await fleet.submit()
    source, _, target = fleet.nodes
    await job.run_on(source.device(0))
    await job.steps(source)
    fleet.troubles.want("attend.restored", RuntimeCode.UNKNOWN, times=1)
    await _move(job)
    view = await job.run_on(source.device(1))
    assert view.recoveries == 1 and view.epoch == 3
    await job.steps(source)
    assert not target.running(job.id)
    await ends(job)


async def test_a_commit_whose_answer_is_lost_counts_for_what_follows(fleet: Fleet) -> None:
    job = await fleet.submit()
    node = fleet.nodes[0]
    await job.run_on(node.device(0))
    await job.steps(node)
    fleet.troubles.want("checkpoint.commit.full.answer", "node.broken-pipe")
    await refused(job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=True)))
    fleet.troubles.none()
    committed = fleet.records.head(job.id)
    assert committed is not None and committed.checkpoint is not None
    await job.end(Outcome.LOST)
    await job.run_on(fleet.nodes[1].device(0))
    assert (await job.show()).step >= committed.step > 0
    await ends(job)


async def test_a_lost_node_sends_the_job_back_to_its_newest_checkpoint(fleet: Fleet) -> None:
    job = await fleet.submit(ranks=2)
    first, second, third = fleet.nodes
    await job.run_on(first.device(0), second.device(0))
    await job.steps(second)
    await job.workflow.execute_update(Update.CHECKPOINT, {"wait": True})
    step = (await job.show()).checkpoints[-1].step
    await fleet.stop_worker(str(second.id))
    await job.direct("lost", nodes=[second.id])
    view = await job.run_on(first.device(0), third.device(0))
    assert view.recoveries == 1 and view.epoch == 2 and view.step == step
    assert "lost" in " ".join(transition.reason for transition in view.transitions)
    await job.steps(third)
    await ends(job)


async def test_a_node_that_is_lost_in_the_middle_of_a_cut(fleet: Fleet) -> None:
    job = await fleet.submit(ranks=2)
    first, second, third = fleet.nodes
    await job.run_on(first.device(0), second.device(0))
    await job.workflow.execute_update(Update.CHECKPOINT, {"wait": True})
    await fleet.stop_worker(str(second.id))
    asked = await job.workflow.start_update(Update.PREEMPT, PreemptRequest(wait=True), wait_for_stage=_ACCEPTED)
    await until(lambda: first.part(job.id).held, "the first node is held")
    await job.direct("lost", nodes=[second.id])
    assert "lost" in await refused(asked.result())
    await job.run_on(first.device(0), third.device(0))
    await job.steps(first)
    await ends(job)


async def test_a_process_that_dies_again_and_again_without_a_step_fails_the_job(fleet: Fleet) -> None:
    job = await fleet.submit(retries={"no_progress": 1})
    node = fleet.nodes[0]
    fleet.troubles.want("attend.fresh", RuntimeCode.UNSUITABLE)
    await job.notice(lambda notice: notice.wants == "devices")
    await job.direct("place", node.device(0))
    await job.notice(lambda notice: notice.wants == "devices" and notice.epoch == 1)
    await job.direct("place", node.device(0))
    with pytest.raises(WorkflowFailureError) as failure:
        await job.workflow.result()
    assert "without a step of progress" in str(failure.value.cause)
    job.check()


async def test_checkpoints_are_progress_of_a_script_that_takes_no_steps(fleet: Fleet) -> None:
    job = await fleet.submit(retries={"no_progress": 1})
    node = fleet.nodes[0]
    node.stepless = True
    for _ in range(2):
        await job.run_on(node.device(0))
        await job.workflow.execute_update(Update.CHECKPOINT, {"wait": True})
        await job.end(Outcome.LOST)
    for _ in range(2):
        await job.run_on(node.device(0))
        await job.end(Outcome.LOST)
    with pytest.raises(WorkflowFailureError) as failure:
        await job.workflow.result()
    assert "2 times in a row without a step of progress" in str(failure.value.cause)
    job.check()


@pytest.mark.parametrize(
    "during",
    [
        "barrier.stop",
        pytest.param("barrier.finish", marks=pytest.mark.slow),
        pytest.param("checkpoint.write.live", marks=pytest.mark.slow),
        "checkpoint.write.full",
    ],
)
async def test_a_rank_that_dies_during_a_cut_is_in_no_checkpoint(fleet: Fleet, during: str) -> None:
    job = await fleet.submit(ranks=2)
    first, second, third = fleet.nodes
    await job.run_on(first.device(0), second.device(0))
    await job.workflow.execute_update(Update.CHECKPOINT, {"wait": True})
    (sound,) = (await job.show()).checkpoints
    await job.steps(second)
    commits = fleet.troubles.calls["checkpoint.commit"]
    held = fleet.troubles.holds[f"node-0.{during}"] = threading.Event()
    full = during.endswith("full")
    # Whose call comes after its end says so itself, perhaps sooner than how it ended is told. Queues stop one by one.
    calls = [f"{node}.{during}" for node in ("node-0", "node-1")[: 1 if during == "barrier.stop" else 2]]
    before = [fleet.troubles.calls[call] for call in calls]
    asked = await (
        job.workflow.start_update(Update.PREEMPT, PreemptRequest(wait=True), wait_for_stage=_ACCEPTED)
        if full
        else job.workflow.start_update(Update.CHECKPOINT, {"wait": True}, wait_for_stage=_ACCEPTED)
    )
    begun = lambda: all(fleet.troubles.calls[call] > count for call, count in zip(calls, before, strict=True))  # noqa: E731
    await until(begun, f"{during} is under way")
    second.part(job.id).end(Outcome.LOST)
    assert "lost a process on node node-1" in await refused(asked.result())
    assert not held.is_set(), "nobody waits for the other node"
    await job.notice(lambda notice: notice.wants == "devices" and notice.epoch == 1)
    held.set()
    assert fleet.troubles.calls["checkpoint.commit"] == commits
    view = await job.run_on(first.device(0), third.device(0))
    assert view.step == sound.step and view.checkpoints[-1].id == sound.id
    await ends(job)


async def test_a_damaged_checkpoint_gives_way_to_an_earlier_one(fleet: Fleet) -> None:
    job = await fleet.submit()
    first, second, _ = fleet.nodes
    await job.run_on(first.device(0))
    await job.steps(first)
    await job.workflow.execute_update(Update.CHECKPOINT, {"wait": True})
    await job.steps(first)
    await job.workflow.execute_update(Update.CHECKPOINT, {"wait": True})
    older, newer = (await job.show()).checkpoints
    fleet.troubles.want("restore", RuntimeCode.DAMAGED, times=1)
    await job.end(Outcome.LOST)
    await job.notice(lambda notice: notice.wants == "devices")
    await job.direct("place", second.device(0))
    await job.notice(lambda notice: notice.wants == "devices" and notice.epoch == 2)
    view = await job.run_on(second.device(0))
    assert view.step == older.step < newer.step
    assert newer.id in " ".join(decision.reason for decision in view.decisions)
    await ends(job)


async def test_a_place_on_a_node_that_does_not_exist_is_given_up(fleet: Fleet) -> None:
    job = await fleet.submit()
    ghost = NodeId("ghost", 1)
    await job.notice(lambda notice: notice.wants == "devices")
    await job.direct("place", fleet.nodes[0].device(0).__class__(ghost, ("cpu-0",)))
    await job.phase(JobPhase.RUNNING)
    await job.direct("lost", nodes=[ghost])
    await job.run_on(fleet.nodes[0].device(0))
    await job.steps(fleet.nodes[0])
    await ends(job)


async def test_ranks_that_fail_because_a_peers_node_is_gone_are_not_the_users_failure(fleet: Fleet) -> None:
    job = await fleet.submit(ranks=2)
    first, second, third = fleet.nodes
    await job.run_on(first.device(0), second.device(0))
    await job.steps(first)
    await fleet.stop_worker(str(second.id))
    first.part(job.id).end(Outcome.FAILED, 1)
    await until(lambda: fleet.troubles.calls["attend"] >= 2, "both were attended")
    await job.direct("lost", nodes=[second.id])
    view = await job.run_on(first.device(0), third.device(0))
    assert view.recoveries == 1 and view.exit_code is None
    await ends(job)


@pytest.mark.slow
async def test_a_target_that_is_dead_holds_the_job_up_for_seconds_only(fleet: Fleet) -> None:
    job = await fleet.submit()
    source, _, target = fleet.nodes
    await job.run_on(source.device(0))
    await job.steps(source)
    await fleet.stop_worker(str(target.id))
    why, view = await _move(job)
    assert "schedule-to-start" in why and view.phase is JobPhase.RUNNING
    await job.steps(source)
    await ends(job)
