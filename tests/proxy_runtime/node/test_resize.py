"""Another width on nodes that have the job already: restored beside what is held there, called off, or counted."""

from __future__ import annotations

import pytest

from model.ids import CheckpointId, Epoch
from proxy_runtime.errors import ErgoError
from tests.proxy_runtime.node.conftest import World
from tests.proxy_runtime.node.nodes import Driver, Machine
from tests.proxy_runtime.node.test_move import SPEC, finish, untouched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def to(job: Driver, *places: tuple[Machine, int]) -> tuple[Epoch, list[Machine], CheckpointId]:
    """Holds the job, and restores it at other places; returns what was before, and the checkpoint."""
    checkpoint = job.checkpoint("full").checkpoint
    assert checkpoint is not None
    before = job.epoch, job.machines, checkpoint
    job.next_epoch(*places, advance=False)
    moved = job.transfer(checkpoint, [machine.node for machine in before[1]])
    here = [machine in before[1] for machine in job.machines]
    assert all(each.bytes == 0 for each, known in zip(moved, here, strict=True) if known), "it is all there"
    job.restore(checkpoint, beside=True)
    return before


def counts(job: Driver, before: tuple[Epoch, list[Machine], CheckpointId]) -> None:
    job.advance()
    job.attend("restored")
    job.stop(before[1], epoch=before[0])


def test_a_node_is_source_and_target_of_a_resize(world: World) -> None:
    expected = untouched(world)
    job = world.begun(SPEC, (world.one, 0), (world.one, 1), step=2)

    first = to(job, (world.one, 1))
    void = job.epoch
    job.stop(only=True)  # called off: it goes on as it was
    job.epoch, job.machines, checkpoint = first
    with pytest.raises(ErgoError) as late:
        job.epoch = void
        job.restore(checkpoint, beside=True)
    assert late.value.code == "runtime.unknown", "nothing of an epoch that was called off starts later"
    job.epoch = first[0]
    job.cut = 1
    job.resume()
    job.until_step(4)

    before = to(job, (world.one, 1))
    counts(job, before)
    job.until_step(6)
    assert [part.epoch for part in world.one.runtime.parts.of_job(job.job)] == [job.epoch]

    before = to(job, (world.one, 0), (world.two, 1))
    counts(job, before)
    finish(job, expected)
    job.stop()
    assert world.processes() == []


def test_an_agent_that_starts_again_between_the_restore_and_the_commit(world: World) -> None:
    expected = untouched(world)
    job = world.begun(SPEC, (world.one, 0), (world.one, 1), step=2)
    before = to(job, (world.one, 0))
    world.one.restart_agent()
    counts(job, before)
    finish(job, expected)
