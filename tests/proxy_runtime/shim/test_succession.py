"""Parts of a later epoch that keep the processes: same bits, same pids, and at any moment one of the two has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from model.runtime import Outcome
from proxy_runtime.shim.part import Limits, Phase
from proxy_runtime.shim.spec import RunError
from tests.proxy_runtime.shim.fleet import Fleet, until

Make = Callable[..., Fleet]
HERE = ((0, 1), ())
ONE = ((0,), ())
SKEW = ("ddp_skew.py", "--epochs", "2")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[int, str]]:
    """What the ranks of an untouched job compute."""

    @cache
    def of(script: str, *arguments: str, ranks: int = 2) -> dict[int, str]:
        from tests.proxy_runtime.shim.fleet import JOBS

        one = Fleet(tmp_path_factory.mktemp("untouched"), (str(JOBS / script), *arguments))
        try:
            one.start(tuple(range(ranks)), (tuple(range(ranks)), ()))
            assert [result.outcome for result in one.wait()] == [Outcome.COMPLETED]
            found = one.results()
            assert set(found) == set(range(ranks))
            return found
        finally:
            one.end()

    return of


def completed(job: Fleet) -> dict[int, str]:
    assert {result.outcome for result in job.wait()} == {Outcome.COMPLETED}
    return job.results()


def test_fewer_devices_and_more_with_the_same_processes(fleet: Make, expected: Callable[..., dict[int, str]]) -> None:
    job = fleet(*SKEW)
    job.start(devices=HERE)
    job.until_step(3)
    pids, first = job.pids(), job.parts[0]
    for placement, devices in (((0, 0), ONE), ((0, 1), HERE)):
        before = job.parts[0]
        (result,) = job.keep(placement, devices)
        assert [state.rank for state in result.ranks] == [0, 1]
        assert job.parts[0].status().phase is Phase.PAUSED
        assert before.status().phase is Phase.FROZEN
        job.go()
        assert before.status().phase is Phase.ENDED
        assert before.status().result.outcome is Outcome.STOPPED  # type: ignore[union-attr]
        assert before.end() is not None
        assert job.pids() == pids
        assert len(job.parts[0].status().proxy_pids) == len(devices[0])
        job.until_step(job.step() + 2)
    assert first.layout.root.exists(), "the processes' directory stays with them"
    assert completed(job) == expected(*SKEW)


@pytest.mark.slow
def test_every_rank_on_its_node(fleet: Make, expected: Callable[..., dict[int, str]]) -> None:
    job = fleet("subgroups.py", "--epochs", "60")
    job.start((0, 1, 2, 3), ((0, 1), (2, 3)))
    job.until_progress(1)
    pids = job.pids()
    job.keep((0, 0, 1, 1), ((0,), (1,)))
    job.go()
    job.until_progress(1)
    job.keep((0, 1, 2, 3), ((0, 1), (2, 3)))
    job.go()
    assert job.pids() == pids
    assert completed(job) == expected("subgroups.py", "--epochs", "60", ranks=4)


def test_called_off_it_runs_on_as_it_was_and_can_be_asked_again(
    fleet: Make, expected: Callable[..., dict[int, str]]
) -> None:
    job = fleet(*SKEW)
    job.start(devices=HERE)
    job.until_step(3)
    before, cut, pids = job.parts, 1, job.pids()
    job.keep((0, 0), ONE)
    fresh = job.parts[0]
    before[0].resume(cut)
    with pytest.raises(RunError, match="runs on as it was"):
        fresh.go()
    fresh.end()
    job.parts, job.placement, job.cut_number = before, (0, 1), cut
    assert job.parts[0].status().phase is Phase.RUNNING
    assert job.pids() == pids
    job.until_step(job.step() + 2)

    (result,) = job.keep((0, 0), ONE)
    again = job.parts[0]
    again.succeed(job.specs[0], job.running)
    assert again.keep(cut + 1) == result
    job.go()
    job.go()
    assert completed(job) == expected(*SKEW)


def test_whoever_ends_the_epoch_before_leaves_its_processes_to_the_one_that_is_ready(
    fleet: Make, expected: Callable[..., dict[int, str]]
) -> None:
    job = fleet(*SKEW)
    job.start(devices=HERE)
    job.until_step(3)
    before, pids = job.parts[0], job.pids()
    job.keep((0, 0), ONE)
    before.end()
    assert job.pids() == pids
    assert job.parts[0].status().phase is Phase.PAUSED
    job.go()
    assert completed(job) == expected(*SKEW)


@pytest.mark.slow
def test_one_that_is_not_ready_gets_nothing(fleet: Make) -> None:
    job = fleet("ends.py", "--steps", "100000", "--rank", "9")
    job.start(devices=HERE)
    job.until_step_is_moving()
    before = job.parts
    goal = job.stop()
    before[0].finish(1, goal)
    job.spawn((0, 0), ONE, kept=before)
    job.connect(fresh=False)
    before[0].end()
    with pytest.raises(RunError):
        job.parts[0].keep(1)
    with pytest.raises(RunError):
        job.go()
    assert not job.pids()


@pytest.mark.slow
def test_a_watchdog_takes_it_back(fleet: Make) -> None:
    job = fleet("ends.py", "--steps", "100000", "--rank", "9", limits=Limits(stopped=20, frozen=0.5))
    job.start(devices=HERE)
    job.until_step_is_moving()
    before = job.parts
    job.keep((0, 0), ONE)
    until(lambda: before[0].status().phase is Phase.RUNNING, "it runs on")
    with pytest.raises(RunError, match="runs on as it was"):
        job.go()
    job.parts, job.placement = before, (0, 1)
    job.until_step_is_moving()


@pytest.mark.slow
def test_other_ranks_are_no_successors(fleet: Make) -> None:
    job = fleet("ends.py", "--steps", "100000", "--rank", "9")
    job.start()
    before = job.parts
    with pytest.raises(RunError, match="ranks that stay"):
        job.spawn((0, 1), ((1,), (0,)), kept=before)


@pytest.mark.slow
def test_a_shim_that_is_killed_takes_both_with_it(fleet: Make, tmp_path: Path) -> None:
    from tests.proxy_runtime.shim.test_part import kill_shim

    job = fleet("ends.py", "--steps", "100000", "--rank", "9")
    job.start(devices=HERE)
    job.until_step_is_moving()
    before = job.parts[0]
    job.keep((0, 0), ONE)
    job.go()
    kill_shim(job.parts[0])
    assert job.parts[0].result() is None, "what is found there must not be taken for its result"
    job.parts[0].end()
    before.end()
