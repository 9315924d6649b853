"""Another width on nodes that have the job already: restored beside what is held there, called off, or counted."""

from __future__ import annotations

import orjson
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
    assert brought(job, world.one) == {"at_hand": 4}
    job.counts(before)
    job.until_step(6)
    assert [part.epoch for part in world.one.runtime.parts.of_job(job.job)] == [job.epoch]

    before = to(job, (world.one, 0), (world.two, 1))
    assert brought(job, world.two) == {"read": 2}, "nothing was brought ahead"
    job.counts(before)
    finish(job, expected)
    job.stop()
    assert world.processes() == []


def brought(job: Driver, machine: Machine) -> dict[str, int]:
    """Where the shim of a part had the files of its ranks from."""
    part = machine.runtime.parts.get(job.job, job.epoch)
    assert part is not None
    events = [orjson.loads(line) for line in part.client.layout.events.read_bytes().splitlines()]
    told = next(event for event in events if event["event"] == "brought" and event["epoch"] == job.epoch)
    return {name: told[name] for name in ("at_hand", "ahead", "read") if name in told}


def test_who_stays_has_its_files_at_hand_and_who_comes_has_most_of_them_ahead(world: World) -> None:
    expected = untouched(world)
    job = world.begun(SPEC, (world.one, 0), (world.one, 1), step=2)
    known = job.checkpoint("live").checkpoint
    assert known is not None
    before = job.epoch, job.machines, job.cut

    job.next_epoch((world.one, 0), (world.two, 0), advance=False)
    job.transfer(known, [world.one.node], ahead=True)
    target, counted = (job.epoch, job.machines, job.cut), job.placement
    job.epoch, job.machines, job.cut = before
    job.until_step(4)
    checkpoint = job.checkpoint("full").checkpoint
    assert checkpoint is not None
    held = world.one.runtime.parts.get(job.job, job.epoch)
    assert held is not None
    job.epoch, job.machines, job.cut = target
    job.placement = counted
    job.transfer(checkpoint, [world.one.node])
    job.restore(checkpoint, beside=True)
    assert brought(job, world.one) == {"at_hand": 2}
    assert brought(job, world.two) == {"ahead": 2}

    assert list(held.client.layout.epoch(before[0]).root.glob("cut-*")), "who goes back to it finds it"
    job.counts((before[0], before[1], checkpoint))
    finish(job, expected)


def test_an_agent_that_starts_again_between_the_restore_and_the_commit(world: World) -> None:
    expected = untouched(world)
    job = world.begun(SPEC, (world.one, 0), (world.one, 1), step=2)
    before = to(job, (world.one, 0))
    world.one.restart_agent()
    job.counts(before)
    finish(job, expected)
