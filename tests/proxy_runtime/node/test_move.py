"""The promise over nodes: checkpointed, preempted, moved, lost; every value that any rank sees is as if untouched."""

from __future__ import annotations

import pytest

from model.ids import CheckpointId, Epoch
from model.runtime import Outcome, TransferInput
from proxy_runtime.errors import ErgoError
from proxy_runtime.node.errors import NodeError
from tests.proxy_runtime.node.conftest import World
from tests.proxy_runtime.node.nodes import Driver, make_spec

_CK = CheckpointId("ck-" + "0" * 40)
SPEC = make_spec("ddp_skew.py", "--epochs", "12", "--skew", "0.04", checkpoint={"keep": 1})


def untouched(world: World) -> dict[int, str]:
    job = world.begun(SPEC, (world.one, 0), (world.two, 0))
    assert [result.outcome for result in job.results()] == [Outcome.COMPLETED] * 2
    expected = job.digests()
    job.stop()
    assert set(expected) == {0, 1}
    return expected


def finish(job: Driver, expected: dict[int, str]) -> None:
    results = job.results()
    assert [result.outcome for result in results] == [Outcome.COMPLETED] * len(results), job.tails()
    assert job.digests() == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_checkpointed_live_preempted_and_restored_on_other_nodes(world: World) -> None:
    expected = untouched(world)
    job = world.begun(SPEC, (world.one, 0), (world.two, 0), step=4)
    live = job.checkpoint("live")
    assert live.checkpoint is not None
    head = world.fleet.head(job.job)
    assert head is not None and (head.checkpoint, head.epoch) == (live.checkpoint, job.epoch)
    assert head.step >= 4
    job.until_step(int(head.step) + 1)  # it went on

    full = job.checkpoint("full")
    assert full.checkpoint is not None and full.checkpoint != live.checkpoint
    job.stop()
    assert world.processes() == []
    assert {result.outcome for result in job.results()} <= {Outcome.STOPPED, Outcome.LOST}

    three, four = world.machine("node-3"), world.machine("node-4")
    job.next_epoch((three, 1), (four, 0))
    moved = job.transfer(full.checkpoint, [world.one.node, world.two.node])
    assert all(each.bytes > 0 for each in moved)
    assert [each.bytes for each in job.transfer(full.checkpoint)] == [0, 0]
    restored = job.restore(full.checkpoint)
    assert sorted(state.rank for each in restored for state in each.ranks) == [0, 1]
    three.restart_agent()
    assert [each.ranks for each in job.restore(full.checkpoint)] == [each.ranks for each in restored]
    job.attend("restored")
    finish(job, expected)

    final = job.checkpoint("final")
    assert final.checkpoint is not None
    head = world.fleet.head(job.job)
    assert head is not None and head.final == final.checkpoint
    job.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_whose_nodes_are_lost_goes_on_from_its_newest_checkpoint(world: World) -> None:
    expected = untouched(world)
    job = world.begun(SPEC, (world.one, 0), (world.one, 1), step=3)
    checkpoint = job.checkpoint("live").checkpoint
    assert checkpoint is not None
    job.until_step(6)
    old, cut = job.epoch, job.cut
    # Nobody says stop: the node is cut off. The next epoch is on the other one, squeezed onto one node.
    job.next_epoch((world.two, 0), (world.two, 1))
    job.transfer(checkpoint)
    job.restore(checkpoint)
    job.attend("restored")
    world.one.runtime.end_fenced()
    finish(job, expected)
    # What the old epoch does is never visible.
    assert world.fleet.head(job.job).checkpoint == checkpoint  # type: ignore[union-attr]
    assert (old, cut) != (job.epoch, job.cut)


@pytest.mark.slow
def test_what_is_out_of_date_is_refused(world: World) -> None:
    job = world.begun(SPEC, (world.one, 0), (world.one, 1), step=1)
    job.barrier()
    job.next_epoch((world.two, 0), (world.two, 1))  # another epoch counts from here on
    job.epoch, job.machines = Epoch(job.epoch - 1), [world.one]
    with pytest.raises(ErgoError) as caught:
        job.checkpoint("live")
    assert caught.value.code == "runtime.fenced"
    with pytest.raises(NodeError) as refused:
        world.one.runtime.transfer(
            TransferInput(job.job, job.epoch, world.fleet.head(job.job).checkpoint or _CK, ("store",), 5.0)  # type: ignore[union-attr]
        )
    assert refused.value.code == "runtime.fenced"
