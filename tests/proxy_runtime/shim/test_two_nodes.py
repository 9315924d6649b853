"""A job on two nodes: cut while it runs, moved to the next epoch, and equal to the bit to one that nobody touched."""

from __future__ import annotations

from collections.abc import Callable

from model.runtime import Outcome
from proxy_runtime.shim.part import Phase
from tests.proxy_runtime.shim.fleet import Fleet

Make = Callable[..., Fleet]


def test_cut_moved_and_bit_identical(fleet: Make) -> None:
    untouched = fleet("ddp_skew.py", "--epochs", "2")
    untouched.start()
    assert [result.outcome for result in untouched.wait()] == [Outcome.COMPLETED] * 2
    expected = untouched.results()
    assert set(expected) == {0, 1}

    moved = fleet("ddp_skew.py", "--epochs", "2")
    moved.start()
    moved.until_step(3)
    first = moved.cut("live")
    assert all(each.parts.volume and each.parts.ranks[0].process for each in first)
    assert [status.phase for status in moved.statuses()] == [Phase.RUNNING] * 2
    checkpoint = moved.commit(moved.cut("full"))
    assert [status.phase for status in moved.statuses()] == [Phase.FROZEN] * 2
    restored = moved.restore(checkpoint, devices=((1,), (0,)))  # each rank on the other node
    assert [status.phase for status in moved.statuses()] == [Phase.PAUSED] * 2
    assert [[state.rank for state in each.ranks] for each in restored] == [[1], [0]]
    moved.go()
    assert [result.outcome for result in moved.wait()] == [Outcome.COMPLETED] * 2
    assert moved.results() == expected
