"""Another width while the job runs: fewer devices, more, called off at any step, and what makes no sense."""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import nullcontext, suppress

import pytest
from temporalio.client import WorkflowFailureError, WorkflowUpdateFailedError, WorkflowUpdateStage

from events.types import DecisionMade, JobPhaseChanged
from model.control import JobView
from model.ids import DeviceId
from model.job_state import JobPhase
from model.names import Update
from model.requests import OperationResult, PreemptRequest, ResizeRequest
from model.runtime import Outcome, RuntimeCode
from tests.workflows.job.fleet import Fleet, Handle, ends, refused, until

_ACCEPTED = WorkflowUpdateStage.ACCEPTED


async def four(fleet: Fleet, **fields) -> Handle:
    """A job of four ranks, one on each of four devices of two nodes."""
    job = await fleet.submit(ranks=4, **fields)
    await job.run_on(*devices(fleet, 4))
    await job.steps(fleet.nodes[0])
    return job


def devices(fleet: Fleet, count: int) -> tuple[DeviceId, ...]:
    return tuple(node.device(index) for node in fleet.nodes[:2] for index in range(2))[:count]


async def resize(job: Handle, width: int, *on: DeviceId) -> tuple[str, JobView]:
    """A person's resize, which the scheduler agrees to; returns why it was refused."""
    before = {one.request for one in job.fleet.notices}
    asked = await job.workflow.start_update(Update.RESIZE, ResizeRequest(width, wait=True), wait_for_stage=_ACCEPTED)
    answer = asyncio.ensure_future(asked.result())
    while not answer.done():
        wishes = [one for one in job.fleet.notices if one.job == job.id and one.wants == "resize"]
        wish = [one for one in wishes if one.request not in before]
        if wish:
            assert wish[-1].width == width
            await job.direct("resize", *(on or devices(job.fleet, width)), request=wish[-1].request, ranks=4)
            break
        await asyncio.sleep(0.03)
    try:
        await answer
    except WorkflowUpdateFailedError as error:
        return str(error.cause), await job.show()
    return "", await job.show()


async def _said(job: Handle, action: str, words: str) -> bool:
    return any(one.action == action and one.reason in words for one in (await job.show()).decisions)


async def test_to_fewer_devices_and_to_more(fleet: Fleet) -> None:
    job = await four(fleet)
    first, second, _ = fleet.nodes
    why, view = await resize(job, 2)
    assert (why, view.width, view.epoch, view.resizes) == ("", 2, 2, 1)
    assert view.device_of_rank == (0, 0, 1, 1) and view.placement == devices(fleet, 2)
    stopped, running = view.transitions[-2:]
    assert running.down_ms is not None and "2 instead of 4" in running.reason
    assert (stopped.phase, stopped.step) == (JobPhase.RESIZING, running.step), "not that of the checkpoint before"
    await job.steps(first)
    await until(lambda: not second.running(job.id), "nothing is left of it elsewhere")
    wishes = await job.notice(lambda notice: notice.phase is JobPhase.RUNNING and len(notice.devices) == 2)
    assert wishes.demand.max_width == 2, "it asks for what the person has said"
    assert wishes.demand.widths == (1, 2) and wishes.demand.measured

    why, view = await resize(job, 1)
    assert (why, view.width, view.epoch) == ("", 1, 3)
    why, view = await resize(job, 4)
    assert (why, view.width, view.device_of_rank) == ("", 4, (0, 1, 2, 3))
    await job.steps(second)
    events = await ends(job)
    assert [event.data.action for event in events if isinstance(event, DecisionMade)] == ["place", *["resize"] * 3]
    changes = [event.data for event in events if isinstance(event, JobPhaseChanged)]
    phases = [str(change.after) for change in changes]
    assert phases == ["queued", "starting", "running", *["resizing", "running"] * 3, "completed"]
    placed = [len(change.placement.devices) for change in changes if change.placement]
    assert placed == [4, 4, 4, 2, 2, 1, 1, 4]


@pytest.mark.parametrize(
    "step",
    [
        *("transfer.ahead", "restore"),
        *(
            pytest.param(step, marks=pytest.mark.slow)
            for step in ("checkpoint.write.live", "barrier.stop", "checkpoint.commit.leaving", "transfer.last")
        ),
    ],
)
async def test_a_resize_that_fails_before_its_commit_leaves_the_job_at_its_width(fleet: Fleet, step: str) -> None:
    job = await four(fleet)
    first, second, _ = fleet.nodes
    fleet.troubles.want(step, RuntimeCode.UNSUITABLE)
    why, view = await resize(job, 2)
    assert "wants" in why and why.endswith("The job was not resized: it is on 4 devices as before. Ask again.")
    view = await job.phase(JobPhase.RUNNING)
    assert (view.epoch, view.width, view.resizes) == (1, 4, 0)
    await job.steps(first)
    await job.steps(second)
    fleet.troubles.none()
    why, view = await resize(job, 2)
    assert (why, view.width) == ("", 2)
    await job.steps(first)
    await ends(job)


@pytest.mark.slow
async def test_a_resize_goes_through_when_the_answer_of_its_commit_is_late(fleet: Fleet) -> None:
    job = await four(fleet)
    fleet.troubles.want("advance_head.answer", "store.unreachable", times=2)
    why, view = await resize(job, 2)
    assert (why, view.width) == ("", 2)
    await ends(job)


@pytest.mark.parametrize("moment", ["barrier.finish", "transfer.ahead", "restore"])
async def test_a_participant_dies_in_the_middle_of_it(fleet: Fleet, moment: str) -> None:
    job = await four(fleet)
    second = fleet.nodes[1]

    async def kill() -> None:
        await until(lambda: fleet.troubles.calls[moment] > 0, f"{moment} is called")
        second.part(job.id).end(Outcome.LOST)

    fleet.troubles.want("restore", RuntimeCode.UNSUITABLE)
    killed = asyncio.ensure_future(kill())
    why, _ = await resize(job, 2)
    await killed
    assert "sk again when it runs" in why and "job has ended" not in why
    view = await job.phase(JobPhase.QUEUED)
    again = await refused(job.workflow.execute_update(Update.RESIZE, {"devices": 2}))
    assert "The job is queued" in again and "Ask again when it runs." in again
    assert view.recoveries == 1
    fleet.troubles.none()
    notice = await job.notice(lambda notice: notice.wants == "devices")
    assert notice.demand.max_width == 4, "it goes on at its old width"
    await job.run_on(*devices(fleet, 4))
    await ends(job)


async def test_a_rank_killed_while_a_resize_is_made_ready_is_no_end(fleet: Fleet) -> None:
    job = await four(fleet)
    held = fleet.troubles.holds["transfer.ahead"] = threading.Event()
    asked = asyncio.ensure_future(resize(job, 2))
    await until(lambda: fleet.troubles.calls["transfer.ahead"] > 0, "it is made ready")
    fleet.nodes[1].part(job.id).end(Outcome.LOST)
    why, _ = await asked
    held.set()
    assert "The job lost a process on node node-1. The job goes on from its newest checkpoint by itself" in why
    assert "but not on 2 devices: ask again when it runs." in why and "ended" not in why
    await job.phase(JobPhase.QUEUED)
    await job.run_on(*devices(fleet, 4))
    await ends(job)


async def test_what_is_made_ready_ahead_is_not_tried_again_by_one_node_alone(fleet: Fleet) -> None:
    """Proxies of all its nodes meet there: whoever tries again would wait for others that have met those before."""
    job = await four(fleet)
    fleet.troubles.want("transfer.ahead", "device-proxy.gone", times=1)
    why, view = await resize(job, 2)
    assert "transfer.ahead" in why
    assert (view.width, view.phase) == (4, JobPhase.RUNNING)
    assert fleet.troubles.calls["transfer.ahead"] == 1
    await ends(job)


@pytest.mark.parametrize(
    ("outcome", "code", "words"),
    [(Outcome.COMPLETED, 0, "its ranks on"), (Outcome.FAILED, 3, r"rank \d exited with 3\.")],
)
async def test_a_job_that_ends_while_a_resize_is_made_ready_has_ended(
    fleet: Fleet, outcome: Outcome, code: int, words: str
) -> None:
    job = await four(fleet)
    held = fleet.troubles.holds["transfer.ahead"] = threading.Event()
    try:
        asked = asyncio.ensure_future(resize(job, 2))
        await until(lambda: fleet.troubles.calls["transfer.ahead"] > 0, "it is made ready")
        await job.end(outcome, code)
        why, _ = await asked
        assert re.search(f"has ended meanwhile: {words}", why)
        await until(lambda: _said(job, "resize not done", why), "and said so, not that something has failed")
    finally:
        held.set()
        fleet.troubles.holds.clear()
    with suppress(WorkflowFailureError) if code else nullcontext():
        await job.workflow.result()
    job.check()


async def test_what_cannot_be_is_refused_with_a_sentence(fleet: Fleet) -> None:
    job = await fleet.submit(ranks=4, min_width=2)
    say = job.workflow.execute_update
    assert "The job is queued" in await refused(say(Update.RESIZE, {"devices": 2}))
    await job.run_on(*devices(fleet, 4))
    for width, words in [
        (0, "cannot run on 0 devices"),
        (-1, "cannot run on -1"),
        (8, "A job of 4 ranks cannot use 8 devices"),
        (3, "possible are 1, 2, 4"),
        (1, "runs on 2 to 4 devices"),
        (4, "runs on 4 devices already, and asks for no other number: there is nothing to do."),
    ]:
        assert words in await refused(say(Update.RESIZE, {"devices": width}))
    assert "devices" in await refused(say(Update.RESIZE, {}))
    assert (await job.show()).epoch == 1
    await ends(job)


async def test_what_does_not_fit_is_refused_with_the_sizes(fleet: Fleet) -> None:
    for node in fleet.nodes:
        node.memory_bytes, node.peak_bytes, node.sketch = 3 << 20, 1 << 20, ()
    job = await four(fleet)
    why, view = await resize(job, 1)
    assert "4 ranks on one device need 4.0 MiB" in why and "a device has 3.0 MiB" in why
    assert (view.width, view.phase) == (4, JobPhase.RUNNING)
    notice = await job.notice(lambda notice: notice.demand.measured)
    assert notice.demand.widths == (2, 4), "the scheduler knows what does not fit"
    why, view = await resize(job, 2)
    assert (why, view.width) == ("", 2)
    await ends(job)


async def test_not_during_another_operation(fleet: Fleet) -> None:
    job = await four(fleet)
    say = job.workflow.execute_update
    hold = fleet.troubles.holds["checkpoint.write.live"] = threading.Event()
    taking = asyncio.ensure_future(say(Update.CHECKPOINT, {"wait": True}))
    await until(lambda: fleet.troubles.calls["checkpoint.write.live"], "a checkpoint is under way")
    assert "asked to checkpoint" in await refused(say(Update.RESIZE, {"devices": 2}))
    hold.set()
    await taking
    del fleet.troubles.holds["checkpoint.write.live"]

    hold = fleet.troubles.holds["restore"] = threading.Event()
    one = asyncio.ensure_future(resize(job, 2))
    await until(lambda: fleet.troubles.calls["restore"], "a resize is under way")
    assert "The job is resizing" in await refused(say(Update.RESIZE, {"devices": 1}))
    assert "The job is resizing" in await refused(say(Update.MIGRATE, {"to": "node-2"}))
    preempted = asyncio.ensure_future(say(Update.PREEMPT, PreemptRequest(wait=True)))
    hold.set()
    assert (await one)[0] == ""
    await preempted
    view = await job.show()
    assert (view.phase, view.resizes, view.preemptions) == (JobPhase.SUSPENDED, 1, 1)
    assert "The job is suspended" in await refused(say(Update.RESIZE, {"devices": 1}))
    await say(Update.CANCEL, {"wait": True})


async def test_a_wish_is_kept_while_the_scheduler_resizes_the_job(fleet: Fleet) -> None:
    job = await four(fleet)
    hold = fleet.troubles.holds["restore"] = threading.Event()
    await job.direct("resize", *devices(fleet, 2), ranks=4)
    await until(lambda: fleet.troubles.calls["restore"], "the scheduler's resize is under way")
    say = job.workflow.execute_update
    assert "resizing" in await refused(say(Update.MIGRATE, {"to": "node-2"}))
    asked = asyncio.ensure_future(say(Update.RESIZE, ResizeRequest(2, wait=True), result_type=OperationResult))
    hold.set()
    assert (await asked).message == "It runs on 2 devices, and asks for no other number from now on."
    assert (await job.show()).width == 2
    await job.notice(lambda notice: notice.demand.max_width == 2 and notice.phase is JobPhase.RUNNING)
    assert "nothing to do" in await refused(say(Update.RESIZE, {"devices": 2}))
    await job.direct("resize", fleet.nodes[0].device(0), ranks=4)

    async def narrow() -> bool:
        return (await job.show()).width == 1

    await until(narrow, "it is narrower")
    told = await say(Update.RESIZE, {"devices": 1}, result_type=OperationResult)
    assert told.message == "It runs on 1 device, and asks for no other number from now on."
    await ends(job)


async def test_a_persons_wish_comes_before_what_the_scheduler_decides_meanwhile(fleet: Fleet) -> None:
    job = await four(fleet)
    asked = asyncio.ensure_future(job.workflow.execute_update(Update.RESIZE, ResizeRequest(2, wait=True)))
    wish = await job.notice(lambda notice: notice.wants == "resize")
    await job.direct("resize", *devices(fleet, 1), request="own-1", ranks=4)

    async def not_done() -> bool:
        return (await job.show()).decisions[-1].action == "resize not done"

    await until(not_done, "the scheduler's own is not done")
    assert (await job.show()).decisions[-1].reason == "The job is about to run on 2 devices: that comes first."
    await job.direct("resize", *devices(fleet, 2), request=wish.request, ranks=4)
    await asked
    assert (await job.show()).width == 2
    await ends(job)


async def test_a_job_that_is_ending_says_so(fleet: Fleet) -> None:
    job = await four(fleet)
    hold = fleet.troubles.holds["checkpoint.write.final"] = threading.Event()
    await job.end(Outcome.COMPLETED)
    await until(lambda: fleet.troubles.calls["checkpoint.write.final"], "its directory is kept")
    why = await refused(job.workflow.execute_update(Update.RESIZE, {"devices": 2}))
    assert "The job is ending: its ranks on" in why and "It cannot be resized any more." in why
    hold.set()
    await job.workflow.result()


async def test_the_scheduler_may_resize_a_job_by_itself_unless_the_job_has_changed_since(fleet: Fleet) -> None:
    job = await four(fleet)
    await job.direct("resize", *devices(fleet, 2), ranks=4)
    view = await job.phase(JobPhase.RUNNING)

    async def narrow() -> bool:
        return (await job.show()).width == 2

    await until(narrow, "it is narrower")
    notice = await job.notice(lambda notice: len(notice.devices) == 2 and notice.phase is JobPhase.RUNNING)
    assert notice.demand.max_width == 4, "it asks for as many as before"
    await job.direct("resize", fleet.nodes[0].device(0), ranks=4, notice=notice.number - 1)
    await until(lambda: job.show(), "it has looked at it")
    await job.steps(fleet.nodes[0])
    view = await job.show()
    assert view.width == 2 and "before the job's newest notice" in view.decisions[-1].reason
    await ends(job)
