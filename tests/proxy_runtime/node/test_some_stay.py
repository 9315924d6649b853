"""Some ranks change their node: those that stay keep their processes, and the directory that these have open."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from model.runtime import Outcome, RuntimeCode
from proxy_runtime.errors import ErgoError
from proxy_runtime.node.parts import Part
from proxy_runtime.storage import volumes
from tests.proxy_runtime.node.conftest import World
from tests.proxy_runtime.node.nodes import Driver, Held, Machine, make_spec, until
from tests.proxy_runtime.node.test_move import finish
from tests.proxy_runtime.node.test_resize import brought

pytestmark = pytest.mark.timeout(600)

FILES = make_spec("volume.py", "--rounds", "15000", ranks=4)
CUTS = 2
"""Of a move: a live one, and that in which ranks leave."""


class Skewed:
    """Jobs of three ranks on three devices of two nodes, which go on until they are told to hurry."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._hurry = world.root / "hurry"
        arguments = ("--epochs", "60", "--skew", "0.06", "--hurry", str(self._hurry))
        self._spec = make_spec("ddp_skew.py", *arguments, ranks=3)
        self._hurry.touch()
        job = self._begun()
        assert {result.outcome for result in job.results()} == {Outcome.COMPLETED}
        self._expected = job.digests()
        job.stop()
        assert set(self._expected) == {0, 1, 2}

    def begun(self, *places: tuple[Machine, int]) -> Driver:
        """One that has done two steps, there or on three devices."""
        self._hurry.unlink()
        return self._begun(*places, step=2)

    def finish(self, job: Driver) -> None:
        """It comes to its end, with the numbers of the one that nobody has touched."""
        self._hurry.touch()
        finish(job, self._expected)

    def _begun(self, *places: tuple[Machine, int], step: int = 0) -> Driver:
        one, two = self._world.one, self._world.two
        return self._world.begun(self._spec, *(places or ((one, 0), (one, 1), (two, 0))), step=step)


def moved(job: Driver, *places: tuple[Machine, int]) -> set[int]:
    """Makes the change; the ranks that have their processes still."""
    pids = job.pids()
    before = job.move_some(*places)
    job.counts((before.epoch, before.machines, before.cut))
    until(lambda: len(job.pids()) == len(pids), "all are there")
    return {rank for rank, pid in job.pids().items() if pid == pids[rank]}


def test_fewer_nodes_and_more_and_others(world: World) -> None:
    skewed = Skewed(world)
    job = skewed.begun()
    assert moved(job, (world.one, 1), (world.one, 0)) == {0, 1}
    assert brought(job, world.one) == {"ahead": 2}, "a process and what its device held"
    job.until_step(4)
    assert moved(job, (world.one, 0), (world.two, 1)) == {0, 1}
    job.until_step(6)
    assert moved(job, (world.two, 1), (world.one, 0), (world.one, 1)) == {1}, "the others have changed places"
    job.until_step(8)
    assert moved(job, (world.two, 0)) == {0}
    skewed.finish(job)
    job.stop()
    assert world.processes() == []


def go_back(job: Driver, held: Held, world: World) -> None:
    """The epoch that was made is not to be: it runs on as it was."""
    void = job.held()
    job.back_to(held)
    job.resume()
    job.back_to(void)
    job.stop(only=True)
    job.back_to(held)
    assert {part.epoch for machine in world.machines for part in machine.runtime.parts.of_job(job.job)} == {held.epoch}


@pytest.mark.slow
def test_called_off_everything_is_as_it_was(world: World) -> None:
    skewed = Skewed(world)
    job = skewed.begun()
    pids = job.pids()
    for _ in range(2):
        held = job.move_some((world.one, 1), (world.one, 0))
        assert all(stopped(pid) for rank, pid in pids.items() if rank < 2)
        go_back(job, held, world)
        assert job.pids() == pids
        until(lambda: not any(map(stopped, pids.values())), "they run on")
        job.until_step(job.progress["node-1"].step + 2)
    assert moved(job, (world.one, 1), (world.one, 0)) == {0, 1}
    skewed.finish(job)


def part_and_proxy(job: Driver, machine: Machine) -> tuple[Part, int]:
    """What a node has of the job in its newest epoch, and the process of a device proxy there."""
    part = machine.runtime.parts.get(job.job, job.epoch)
    assert part is not None
    return part, next(iter(part.client.status().proxy_pids.values()))


def stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] in "Tt"


@pytest.mark.slow
def test_an_agent_that_starts_again_between_the_restore_and_the_commit(world: World) -> None:
    skewed = Skewed(world)
    job = skewed.begun()
    pids = job.pids()
    before = job.move_some((world.one, 1), (world.one, 0))
    world.one.restart_agent()
    job.counts((before.epoch, before.machines, before.cut))
    job.until_step(4)
    assert {rank for rank, pid in job.pids().items() if pid == pids[rank]} == {0, 1}
    skewed.finish(job)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "while they are restored"])
def test_a_proxy_that_dies_while_ranks_come_leaves_the_job_where_it_was(world: World, moment: str) -> None:
    skewed = Skewed(world)
    job = skewed.begun()
    pids = job.pids()
    held = job.held()

    def strike(part: Part, proxy: int) -> None:
        if moment != "before":
            until(lambda: part.client.status().living, "the ranks that stay are in both epochs")
        os.kill(proxy, signal.SIGKILL)

    with ThreadPoolExecutor(1) as beside:
        struck: list[Future[None]] = []

        def begin() -> None:
            struck.append(beside.submit(strike, *part_and_proxy(job, world.one)))
            if moment == "before":
                struck[0].result()

        with pytest.raises(ErgoError, match="proxy"):
            job.move_some((world.one, 1), (world.one, 0), before_restore=begin)
        struck[0].result()
    go_back(job, replace(held, cut=held.cut + CUTS), world)
    assert job.pids() == pids
    skewed.finish(job)


@pytest.mark.slow
def test_whom_the_others_have_met_does_not_try_again_alone(world: World) -> None:
    skewed = Skewed(world)
    job = skewed.begun((world.one, 0))
    pids = job.pids()
    held = job.held()

    def strike() -> None:
        _, proxy = part_and_proxy(job, world.two)
        os.kill(proxy, signal.SIGKILL)

    with pytest.raises(ErgoError, match="proxy") as caught:
        job.move_some((world.one, 0), (world.one, 1), (world.two, 0), before_restore=strike)
    assert caught.value.code == RuntimeCode.UNKNOWN
    go_back(job, replace(held, cut=held.cut + CUTS), world)
    assert job.pids() == pids
    skewed.finish(job)


def written(job: Driver, rank: int) -> bool:
    try:
        return "PROGRESS 100\n" in job.log(rank)
    except FileNotFoundError:  # it is being started
        return False


@pytest.mark.slow
def test_files_of_who_comes_are_there_and_those_in_use_are_as_they_were(world: World) -> None:
    expected = {0: "", 1: "", 2: "", 3: ""}
    alone = world.begun(FILES, (world.two, 0))
    assert {result.outcome for result in alone.results()} == {Outcome.COMPLETED}
    expected = alone.digests()
    alone.stop()

    four = [(machine, index) for machine in (world.one, world.two) for index in range(2)]
    job = world.begun(FILES, *four)
    until(lambda: all(written(job, rank) for rank in range(4)), "it has files")
    held = job.move_some(*four[:2])
    go_back(job, held, world)
    assert moved(job, *four[:2]) == {0, 1}
    assert moved(job, *four) == {0, 1}
    assert moved(job, four[3]) == {2, 3}
    finish(job, expected)
    final = job.checkpoint("final").checkpoint
    assert final is not None
    there = {entry.path for entry in volumes.list_files(world.fleet, job.spec.tenant, final) if entry.kind == "file"}
    names = ("open.txt", "append.txt", "scratch-14997", "scratch-14998", "scratch-14999")
    mine = {f"directory/volume/rank{rank}/{name}" for rank in range(4) for name in names}
    assert {path for path in there if path.startswith("directory/")} == mine
