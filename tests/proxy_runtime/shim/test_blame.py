"""Whose end is told: of ranks that end because of each other the one that began it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

from proxy_runtime.shim.blame import GRACE_S, Blame, left_by
from proxy_runtime.shim.generation import Rank
from proxy_runtime.shim.spec import RankExit


def told(rank: int, other: int) -> str:
    return f"rank {rank} waits in AllReduce (number 3 of communicator 7) for rank {other}, which has ended without it"


def rank(number: int, code: int | None = None, *, of: int | None = None, leaving: bool = False) -> Rank:
    """One that has ended with `code`, or lives; was left alone by rank `of`; whose interpreter is `leaving`."""
    ring = SimpleNamespace(error=None if of is None else told(number, of), rank_leaving=leaving)
    return Rank(number, cast(Any, ring), MagicMock(), None if code is None else RankExit(number, code))


class Judge:
    """Asks at times of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.blame = Blame(lambda: self.now)

    def ended(self, *ranks: Rank) -> list[int]:
        return [each.rank for each in self.blame.ended(ranks)]


def test_who_left_is_read_from_what_the_device_says() -> None:
    assert left_by(told(0, 12)) == 12
    assert left_by(f"{told(0, 2)}: ValueError") == 2
    assert left_by("rank 0 waits in AllReduce for a rank whose device proxy is lost: gone") is None
    assert left_by(None) is None


def test_who_began_it_comes_first() -> None:
    assert Judge().ended(rank(0, 1, of=2), rank(1), rank(2, 1)) == [2, 0]
    assert Judge().ended(rank(0, 1), rank(1, 0)) == [0, 1]


def test_who_was_left_alone_is_not_judged_before_the_other_has_ended() -> None:
    judge = Judge()
    assert judge.ended(rank(0, 1, of=1), rank(1, leaving=True)) == []
    judge.now += GRACE_S - 1
    assert judge.ended(rank(0, 1, of=1), rank(1, leaving=True), rank(2, 1)) == [2]
    assert judge.ended(rank(0, 1, of=1), rank(1, 1, of=None)) == [1, 0]
    judge.now += 2
    assert judge.ended(rank(0, 1, of=1), rank(1, leaving=True)) == [0], "its exit handlers never end"


def test_who_was_left_alone_by_a_rank_of_another_node_is_judged_when_that_node_had_its_time() -> None:
    judge = Judge()
    assert judge.ended(rank(0, 1, of=5), rank(1)) == []
    judge.now += GRACE_S - 1
    assert judge.ended(rank(0, 1, of=5), rank(1, 3)) == [1], "a failure of its own is told at once"
    judge.now += 2
    assert judge.ended(rank(0, 1, of=5), rank(1)) == [0], "that one has ended with 0, perhaps"


def test_who_has_exited_with_0_all_the_same_needs_no_judgement() -> None:
    assert Judge().ended(rank(0, 0, of=5)) == [0]
