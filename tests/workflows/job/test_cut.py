"""Where the communicators of a job let go at a cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import ModelError
from model.ids import Step
from model.manifest import CommunicatorState, RankState
from model.runtime import CollectiveTarget
from workflows.job.cut import lowest_step, slowest, targets


def _rank(rank: int, step: int = 0, **communicators: tuple[tuple[int, ...], int]) -> RankState:
    return RankState(
        rank=rank,
        step=Step(step),
        communicators=tuple(
            CommunicatorState(name=name, members=members, contributed=count, completed=0)
            for name, (members, count) in communicators.items()
        ),
    )


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8))
def test_the_target_is_the_fewest_that_any_member_has_contributed(counts: list[int]) -> None:
    members = tuple(range(len(counts)))
    ranks = [_rank(rank, world=(members, count)) for rank, count in enumerate(counts)]
    assert targets(ranks) == (CollectiveTarget("world", min(counts)),)
    assert targets(reversed(ranks)) == targets(ranks)


def test_a_member_that_does_not_list_a_communicator_has_contributed_nothing() -> None:
    ranks = [_rank(0, pair=((0, 1), 5)), _rank(1)]
    assert targets(ranks) == (CollectiveTarget("pair", 0),)


def test_communicators_are_counted_one_by_one() -> None:
    ranks = [_rank(0, a=((0, 1), 5), b=((0,), 9)), _rank(1, a=((0, 1), 4))]
    assert targets(ranks) == (CollectiveTarget("a", 4), CollectiveTarget("b", 9))


def test_members_that_disagree_make_no_cut() -> None:
    with pytest.raises(ModelError, match="disagree"):
        targets([_rank(0, a=((0, 1), 5)), _rank(1, a=((1, 2), 5))])


def test_steps_and_timings() -> None:
    assert lowest_step([_rank(0, 7), _rank(1, 5)]) == 5
    assert lowest_step([]) is None


def test_the_step_of_what_starts_its_own_ranks_is_that_of_its_foremost_channel():
    assert lowest_step([_rank(0, 0), _rank(1, 7), _rank(2, 5), _rank(3, 0)], "node") == 7
    assert lowest_step([], "node") is None
    assert lowest_step([_rank(0, 0), _rank(1, 0)], "node") == 0
    assert slowest([{"a": 1.0}, {"a": 3.0, "b": 2.0}]) == {"a": 3.0, "b": 2.0}
