"""Other devices of the same nodes: the ranks' processes are kept, and whatever fails leaves the job as it was."""

from __future__ import annotations

import asyncio

import pytest

from model.job_state import JobPhase
from model.names import Update
from model.runtime import Outcome, RuntimeCode
from tests.workflows.job.fleet import Fleet, Handle, ends, refused, until
from tests.workflows.job.test_resize import devices, four, resize


async def narrower(job: Handle) -> tuple[str, int]:
    """From two devices on each of two nodes to one on each; why it was refused, and the width."""
    first, second, _ = job.fleet.nodes
    why, view = await resize(job, 2, first.device(0), second.device(0))
    return why, view.width


async def test_who_stays_on_its_node_keeps_its_processes(fleet: Fleet) -> None:
    job = await four(fleet)
    calls = fleet.troubles.calls
    assert await narrower(job) == ("", 2)
    assert (calls["transfer.keeps"], calls["restore.kept"]) == (2, 2)
    assert calls["checkpoint.write.live"] == 2, "nobody knew before who shares with whom"
    why, view = await resize(job, 4)
    assert (why, view.width, view.device_of_rank) == ("", 4, (0, 1, 2, 3))
    assert calls["checkpoint.write.live"] == 2, "now it is known"
    assert (calls["checkpoint.write.full"], calls["transfer.last"]) == (0, 0)
    assert [one.kind for one in view.checkpoints] == ["live"]
    running = view.transitions[-1]
    assert running.down_ms is not None and {"barrier", "restore", "head"} <= set(running.parts_ms)
    for node in fleet.nodes[:2]:
        await job.steps(node)

    why, view = await resize(job, 2)
    assert (why, view.width) == ("", 2)
    assert (calls["checkpoint.write.full"], calls["checkpoint.write.leaving"]) == (0, 2), "two change their node"
    assert calls["restore.come"] == 1, "beside the two that stay"
    why, view = await resize(job, 1)
    assert (why, view.width, calls["restore.kept"]) == ("", 1, 6)
    await ends(job)


async def test_a_move_to_other_devices_of_its_node_too(fleet: Fleet) -> None:
    job = await fleet.submit(ranks=1)
    first = fleet.nodes[0]
    await job.run_on(first.device(0))
    await job.steps(first)
    await job.direct("migrate", first.device(1))

    view = await job.phase(JobPhase.MOVING)
    view = await job.phase(JobPhase.RUNNING)
    assert (view.placement, view.moves) == ((first.device(1),), 1)
    assert fleet.troubles.calls["restore.kept"] == 1
    await ends(job)


@pytest.mark.parametrize("step", ["transfer.keeps", "barrier.finish", "restore.kept"])
async def test_what_fails_before_the_commit_leaves_it_as_it_was(fleet: Fleet, step: str) -> None:
    job = await four(fleet)
    await job.workflow.execute_update(Update.CHECKPOINT, {"wait": True})
    fleet.troubles.want(step, "device-proxy.gone")
    why, width = await narrower(job)
    assert why.endswith("The job was not resized: it is on 4 devices as before. Ask again."), why
    assert width == 4
    for node in fleet.nodes[:2]:
        await job.steps(node)
    fleet.troubles.none()
    assert await narrower(job) == ("", 2)
    await ends(job)


async def test_where_processes_cannot_be_kept_it_goes_the_long_way(fleet: Fleet) -> None:
    """Such as of a shim that was there before its agent was replaced."""
    job = await four(fleet)
    fleet.troubles.want("transfer.keeps", RuntimeCode.UNSUITABLE)
    assert await narrower(job) == ("", 2)
    assert (fleet.troubles.calls["restore.kept"], fleet.troubles.calls["checkpoint.write.full"]) == (0, 2)
    assert any(one.action == "processes not kept" for one in (await job.show()).decisions)
    await ends(job)


async def test_memory_that_has_grown_since_is_found_when_they_stand(fleet: Fleet) -> None:
    for node in fleet.nodes:
        node.memory_bytes, node.peak_bytes = 3 << 20, 1 << 10
    job = await four(fleet)
    await job.workflow.execute_update(Update.CHECKPOINT, {"wait": True})
    for node in fleet.nodes:
        node.peak_bytes = 2 << 20
    why, width = await narrower(job)
    assert "2 ranks on one device need 4.0 MiB" in why and "a device has 3.0 MiB" in why
    assert width == 4
    for node in fleet.nodes[:2]:
        await job.steps(node)
    notice = await job.notice(lambda notice: notice.demand.measured and notice.demand.widths == (4,))
    assert notice.phase is JobPhase.RUNNING, "the scheduler is told"
    await ends(job)


@pytest.mark.parametrize("moment", ["transfer.keeps", "restore.kept"])
async def test_a_rank_that_dies_in_the_middle(fleet: Fleet, moment: str) -> None:
    job = await four(fleet)
    second = fleet.nodes[1]

    async def kill() -> None:
        await until(lambda: fleet.troubles.calls[moment] > 0, f"{moment} is called")
        second.part(job.id).end(Outcome.LOST)

    fleet.troubles.want("restore.kept", "device-proxy.gone")
    killed = asyncio.ensure_future(kill())
    why, _ = await narrower(job)
    await killed
    assert why
    fleet.troubles.none()
    view = await job.phase(JobPhase.QUEUED)
    assert view.recoveries == 1
    assert "resize" in await refused(job.workflow.execute_update(Update.RESIZE, {"devices": 2}))
    await job.run_on(*devices(fleet, 4))
    await ends(job)
