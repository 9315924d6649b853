"""A job's life, from its start to each of its ends."""

from __future__ import annotations

import pytest
from temporalio.client import (
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowUpdateFailedError,
    WorkflowUpdateStage,
)
from temporalio.exceptions import ApplicationError, CancelledError

from events.types import CheckpointCommitted, DecisionMade, JobPhaseChanged
from model.control import JobView
from model.job_state import JobPhase
from model.names import JOB_TASK_QUEUE, JOB_WORKFLOW, Query, Update
from model.requests import (
    MigrateRequest,
    PreemptRequest,
    ResizeRequest,
)
from model.runtime import Outcome
from tests.workflows.job.fleet import Fleet, until

_ACCEPTED = WorkflowUpdateStage.ACCEPTED


async def test_a_job_runs_is_preempted_resumed_moved_and_completed(fleet: Fleet) -> None:
    job = await fleet.submit(ranks=2)
    first, second, third = fleet.nodes
    await job.run_on(first.device(0), first.device(1))
    await job.steps(first)

    answer = await job.workflow.execute_update(Update.PREEMPT, PreemptRequest(wait=True))
    assert answer["phase"] == "suspended"
    assert not first.running(job.id)
    view = await job.show()
    assert view.held and view.placement == () and view.checkpoints[-1].kind == "full"
    await job.notice(lambda notice: notice.phase is JobPhase.SUSPENDED and notice.held and notice.wants == "nothing")

    await job.workflow.execute_update(Update.RESUME)
    view = await job.run_on(second.device(0), second.device(1))
    assert second.part(job.id).step >= view.checkpoints[-1].step
    assert view.epoch == 2 and view.transitions[-1].down_ms is not None
    await job.steps(second)

    moving = await job.workflow.start_update(
        Update.MIGRATE, MigrateRequest("node-2", wait=True, reason="a new kernel"), wait_for_stage=_ACCEPTED
    )
    notice = await job.notice(lambda notice: notice.wants == "move")
    assert notice.move_to == "node-2"
    await job.direct("migrate", third.device(0), third.device(1), request=notice.request)
    assert (await moving.result())["phase"] == "running"
    await job.steps(third)
    view = await job.show()
    assert view.moves == 1 and not second.running(job.id)
    assert all("a new kernel" in one.reason for one in (*view.transitions[-2:], view.decisions[-1]))
    assert view.transitions[-1].down_ms is not None and view.transitions[-1].down_ms < 30_000
    assert {"barrier", "write", "commit", "transfer", "restore", "head"} <= set(view.transitions[-1].parts_ms or {})

    await job.end(Outcome.COMPLETED)
    end = await job.workflow.result()
    assert end["phase"] == "completed" and end["exit_code"] == 0 and end["final"]
    events = job.check()
    phases = [event.data.after for event in events if isinstance(event, JobPhaseChanged)]
    assert [str(phase) for phase in phases] == [
        *("queued", "starting", "running", "suspending", "suspended", "queued", "starting", "running"),
        *("moving", "running", "completed"),
    ]
    assert [event.data.kind for event in events if isinstance(event, CheckpointCommitted)] == ["full", "live", "full"]
    assert [event.data.action for event in events if isinstance(event, DecisionMade)] == ["place", "place", "migrate"]
    last = await job.notice(lambda notice: notice.phase is JobPhase.COMPLETED)
    assert last.devices == () and last.wants == "nothing"


async def test_a_move_that_no_person_has_asked_for_is_told_as_long_as_it_is_under_way(fleet: Fleet) -> None:
    """The scheduler keeps both places for the job meanwhile; one that was decided on an older notice is not done."""
    job = await fleet.submit(ranks=2)
    first, second, _ = fleet.nodes
    await job.run_on(first.device(0), first.device(1))
    await job.steps(first)
    newest = await job.notice(lambda notice: notice.phase is JobPhase.RUNNING)
    places = second.device(0), second.device(1)
    await job.direct("migrate", *places, request="drain-7", notice=newest.number - 1)

    async def refused() -> bool:
        return (await job.show()).decisions[-1].action == "migrate not done"

    await until(refused, "the older one is not done")
    await job.direct("migrate", *places, request="drain-8", notice=newest.number)
    told = await job.notice(lambda notice: notice.wants == "move")
    assert (told.request, told.move_to, told.devices) == ("drain-8", "node-1", newest.devices)
    last = await job.notice(lambda notice: notice.devices == places and notice.wants == "nothing")
    assert last.phase is JobPhase.RUNNING and last.since is not None and last.delivered_ms is not None
    view = await job.show()
    assert view.moves == 1 and not first.running(job.id)
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    job.check()


async def test_a_failing_program_fails_the_workflow_with_its_last_words(fleet: Fleet) -> None:
    job = await fleet.submit(ranks=2)
    first, second, _ = fleet.nodes
    await job.run_on(first.device(0), second.device(0))
    await job.steps(first)
    first.part(job.id).end(Outcome.FAILED, 3)
    with pytest.raises(WorkflowFailureError) as failure:
        await job.workflow.result()
    cause = failure.value.cause
    assert isinstance(cause, ApplicationError) and cause.type == "job.failed"
    assert "exited with 3" in str(cause) and "the end" in str(cause)
    assert second.part(job.id).outcome is Outcome.STOPPED
    view = await job.show()
    assert view.phase is JobPhase.FAILED and view.exit_code == 3 and view.final is not None
    assert view.failure.startswith("Rank 0")
    job.check()


async def test_what_starts_its_own_ranks_is_one_on_one_node_and_keeps_its_width(fleet: Fleet) -> None:
    job = await fleet.submit(pack="node", devices_per_rank=2)
    first, *_ = fleet.nodes
    notice = await job.notice(lambda notice: notice.wants == "devices")
    assert (notice.demand.ranks, notice.demand.ranks_per_group) == (2, 2)
    assert (notice.demand.min_width, notice.demand.max_width) == (2, 2)
    await job.run_on(first.device(0), first.device(1))
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await job.workflow.execute_update(Update.RESIZE, ResizeRequest(1))
    assert "it has its 2 devices for life" in str(refused.value.cause)
    assert (await job.show()).pack == "node"
    await job.steps(first)
    await job.end(Outcome.FAILED, 3)
    with pytest.raises(WorkflowFailureError):
        await job.workflow.result()
    assert (await job.show()).failure.startswith("The command exited with 3.")
    job.check()


async def test_a_failing_program_is_started_again_as_often_as_it_asks(fleet: Fleet) -> None:
    job = await fleet.submit(retries={"failure": 1})
    node = fleet.nodes[0]
    await job.run_on(node.device(0))
    await job.steps(node)
    await job.end(Outcome.FAILED, 1)
    await job.run_on(node.device(0))
    await job.end(Outcome.FAILED, 1)
    with pytest.raises(WorkflowFailureError):
        await job.workflow.result()
    job.check()


async def test_cancel_in_the_ui_ends_it_cancelled_with_its_events(fleet: Fleet) -> None:
    job = await fleet.submit()
    node = fleet.nodes[0]
    await job.run_on(node.device(0))
    await job.workflow.cancel()
    with pytest.raises(WorkflowFailureError) as failure:
        await job.workflow.result()
    assert isinstance(failure.value.cause, CancelledError)
    assert not node.running(job.id)
    description = await job.workflow.describe()
    assert description.status is WorkflowExecutionStatus.CANCELED
    events = job.check()
    assert events[-1].data.after is JobPhase.CANCELLED  # type: ignore[union-attr]


async def test_cancel_by_update_while_queued(fleet: Fleet) -> None:
    job = await fleet.submit()
    await job.notice(lambda notice: notice.wants == "devices")
    await job.workflow.execute_update(Update.CANCEL)
    end = await job.workflow.result()
    assert end["phase"] == "cancelled"
    job.check()


@pytest.mark.parametrize(
    ("job_id", "spec", "words"),
    [
        ("bad-spec", {"apiVersion": "ergosphere/v1", "rankz": 2, "tier": "gold"}, ["rankz", "tier", "argv"]),
        ("Not A Job", {"apiVersion": "ergosphere/v1", "argv": []}, ["Not A Job", "argv"]),
        ("not-a-mapping", [1, 2], ["mapping of fields"]),
    ],
)
async def test_an_invalid_start_fails_at_once_with_all_faults(
    fleet: Fleet, job_id: str, spec: object, words: list[str]
):
    handle = await fleet.client.start_workflow(JOB_WORKFLOW, spec, id=job_id, task_queue=JOB_TASK_QUEUE)
    with pytest.raises(WorkflowFailureError) as failure:
        await handle.result()
    assert isinstance(failure.value.cause, ApplicationError) and failure.value.cause.non_retryable
    view = await handle.query(Query.SHOW.value, result_type=JobView)
    assert view.phase is JobPhase.FAILED and not view.waiting
    assert view.id == (job_id if job_id.islower() else "invalid")
    for word in words:
        assert word in str(failure.value.cause) and word in view.failure


async def test_no_input_at_all_fails_with_a_sentence(fleet: Fleet) -> None:
    handle = await fleet.client.start_workflow(JOB_WORKFLOW, id="no-input", task_queue=JOB_TASK_QUEUE)
    with pytest.raises(WorkflowFailureError) as failure:
        await handle.result()
    assert "mapping of fields" in str(failure.value.cause)
