"""Some ranks change their node: only these are written and restored, and whatever fails leaves the job as it was."""

from __future__ import annotations

import pytest

from model.job_state import JobPhase
from model.runtime import RuntimeCode
from tests.workflows.job.fleet import Fleet, ends
from tests.workflows.job.test_resize import four, resize


async def test_only_who_changes_its_node_is_written_and_the_job_goes_back_to_what_was_before(fleet: Fleet) -> None:
    job = await four(fleet)
    first, second, _ = fleet.nodes
    calls = fleet.troubles.calls
    why, view = await resize(job, 2)
    assert (why, view.width) == ("", 2)
    assert (calls["checkpoint.write.leaving"], calls["checkpoint.commit.leaving"]) == (2, 1)
    assert (calls["restore"], calls["restore.come"], calls["checkpoint.write.full"]) == (1, 1, 0)
    assert [one.kind for one in view.checkpoints] == ["live"], "what leaves is nothing to go back to"
    head = fleet.records.head(job.id)
    assert head is not None and head.checkpoint == view.checkpoints[0].id

    why, view = await resize(job, 4)
    assert (why, view.width) == ("", 4)
    assert (calls["checkpoint.write.leaving"], calls["restore"], calls["restore.come"]) == (3, 3, 2)
    assert calls["restore.kept"] == 2, "all ranks of the other node have come"
    await job.steps(first)
    await job.steps(second)
    await ends(job)


async def test_a_move_of_half_of_its_ranks_too(fleet: Fleet) -> None:
    job = await four(fleet)
    first, _, third = fleet.nodes
    devices = [node.device(index) for node in (first, third) for index in range(2)]
    await job.direct("migrate", *devices, ranks=4)
    await job.phase(JobPhase.MOVING)
    view = await job.phase(JobPhase.RUNNING)
    assert (view.placement, view.moves) == (tuple(devices), 1)
    assert (fleet.troubles.calls["restore.kept"], fleet.troubles.calls["restore"]) == (1, 2)
    await ends(job)


@pytest.mark.parametrize("step", ["transfer.keeps", "restore.come"])
async def test_where_processes_cannot_be_kept_all_are_written(fleet: Fleet, step: str) -> None:
    job = await four(fleet)
    fleet.troubles.want(step, RuntimeCode.UNSUITABLE, times=1)
    why, view = await resize(job, 2)
    assert (why, view.width, view.resizes) == ("", 2, 1)
    assert "processes not kept" in [decision.action for decision in view.decisions]
    calls = fleet.troubles.calls
    assert calls["checkpoint.write.full"] == 2
    assert calls["checkpoint.write.leaving"] == (0 if step == "transfer.keeps" else 2)
    await ends(job)


@pytest.mark.parametrize(
    "step", ["checkpoint.write.leaving", "checkpoint.commit.leaving", "transfer.last", "restore.come"]
)
async def test_one_that_fails_leaves_the_job_where_it_was(fleet: Fleet, step: str) -> None:
    job = await four(fleet)
    first, second, _ = fleet.nodes
    fleet.troubles.want(step, "device-proxy.gone", times=8)
    why, view = await resize(job, 2)
    assert "wants" in why and why.endswith("The job was not resized: it is on 4 devices as before. Ask again.")
    view = await job.phase(JobPhase.RUNNING)
    assert (view.epoch, view.width, view.resizes) == (1, 4, 0)
    await job.steps(first)
    await job.steps(second)
    assert len([part for node in fleet.nodes for part in node.parts.values() if part.outcome is None]) == 2
    fleet.troubles.none()
    why, view = await resize(job, 2)
    assert (why, view.width) == ("", 2)
    await ends(job)
