"""Other devices of the same nodes: the processes stay, whoever is told what and in whatever order."""

from __future__ import annotations

import os
import signal

import pytest

from model.runtime import Outcome
from proxy_runtime.errors import ErgoError
from tests.proxy_runtime.node.conftest import World
from tests.proxy_runtime.node.test_move import _CK, SPEC, finish, untouched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_processes_are_kept_again_and_again_and_a_checkpoint_is_as_good_as_ever(world: World) -> None:
    expected = untouched(world)
    job = world.begun(SPEC, (world.one, 0), (world.one, 1), step=2)
    pids = job.pids()
    job.counts(job.keep((world.one, 1)))
    assert job.pids() == pids
    job.until_step(4)
    job.counts(job.keep((world.one, 1), (world.one, 0)))
    assert job.pids() == pids
    job.until_step(5)
    assert [part.epoch for part in world.one.runtime.parts.of_job(job.job)] == [job.epoch]

    checkpoint = job.checkpoint("full").checkpoint
    assert checkpoint is not None
    job.stop()
    assert world.processes() == []
    assert not list((world.one.root / "runs").glob("*"))
    job.next_epoch((world.two, 0))
    job.transfer(checkpoint)
    job.restore(checkpoint)
    job.attend("restored")
    finish(job, expected)


def test_every_rank_stays_on_one_of_two_nodes(world: World) -> None:
    expected = untouched(world)
    job = world.begun(SPEC, (world.one, 0), (world.two, 0), step=2)
    pids = job.pids()
    job.counts(job.keep((world.one, 1), (world.two, 1)))
    assert job.pids() == pids
    finish(job, expected)


def test_called_off_it_runs_on_and_the_void_epoch_gets_nothing(world: World) -> None:
    expected = untouched(world)
    job = world.begun(SPEC, (world.one, 0), (world.one, 1), step=2)
    pids, placement = job.pids(), job.placement
    before = job.keep((world.one, 1))
    void = job.epoch
    job.epoch, job.machines, job.cut = before
    job.resume()
    job.epoch = void
    job.stop(only=True)
    with pytest.raises(ErgoError) as late:
        job.restore(_CK, beside=True, cut=before[2])
    assert late.value.code == "runtime.unknown"
    job.epoch, job.placement = before[0], placement
    assert job.pids() == pids
    job.until_step(4)
    job.counts(job.keep((world.one, 1)))
    assert job.pids() == pids
    finish(job, expected)


@pytest.mark.parametrize("then", ["stop first", "attend first"])
def test_an_agent_that_starts_again_before_the_commit(world: World, then: str) -> None:
    expected = untouched(world)
    job = world.begun(SPEC, (world.one, 0), (world.one, 1), step=2)
    pids = job.pids()
    before = job.keep((world.one, 0))
    world.one.restart_agent()
    job.advance()
    if then == "stop first":
        world.one.runtime.end_fenced()  # the epoch counts, and nobody attends it yet
        assert job.pids() == pids
        job.attend("restored")
    else:
        job.attend("restored")
        job.stop(before[1], epoch=before[0])
    assert job.pids() == pids
    finish(job, expected)


def test_one_that_cannot_run_any_more_is_lost_at_once(world: World) -> None:
    job = world.begun(SPEC, (world.one, 0), (world.one, 1), step=2)
    before = job.keep((world.one, 0))
    held = world.one.runtime.parts.get(job.job, before[0])
    assert held is not None
    held.client.resume(before[2])  # its watchdog, say
    job.advance()
    job.attend("restored")
    assert [result.outcome for result in job.results()] == [Outcome.LOST]
    job.stop()
    assert world.processes() == []


def test_a_rank_that_dies_while_it_is_held_is_found_by_whoever_has_it(world: World) -> None:
    job = world.begun(SPEC, (world.one, 0), (world.one, 1), step=2)
    before = job.keep((world.one, 0))
    held = world.one.runtime.parts.get(job.job, before[0])
    assert held is not None
    os.kill(held.client.status().rank_pids[1], signal.SIGKILL)
    job.counts(before)
    assert [result.outcome for result in job.results()] == [Outcome.LOST]
