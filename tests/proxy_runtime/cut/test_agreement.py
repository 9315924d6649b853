"""Targets and the check of completed counts: pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy_runtime.cut.agreement import AgreementError, SequenceCounts, targets, verify_completed


def counts(contributed: int, completed: int, members: list[int]) -> SequenceCounts:
    return {"contributed": contributed, "completed": completed, "members": members}


def test_target_is_the_smallest_contributed_of_each_sequence() -> None:
    reports = [
        {"7": counts(5, 4, [0, 1, 2]), "9": counts(2, 2, [0, 2])},
        {"7": counts(4, 4, [0, 1, 2])},
        {"7": counts(6, 4, [0, 1, 2]), "9": counts(3, 1, [0, 2])},
    ]
    assert targets(reports) == {"7": 4, "9": 2}


def test_no_reports_no_targets() -> None:
    assert targets([]) == {}
    assert verify_completed([]) == {}


def test_a_member_that_does_not_list_a_sequence_counts_zero() -> None:
    # Rank 1 has not defined the communicator, and never received.
    reports = [{"7": counts(1, 0, [0, 1]), "7:0>1": counts(3, 0, [0, 1])}, {}]
    assert targets(reports) == {"7": 0, "7:0>1": 0}


def test_a_missing_report_of_an_active_member_is_an_error() -> None:
    with pytest.raises(AgreementError, match=r"Communicator 7 of ranks \[0, 1\], 1 of them not reported"):
        targets([{"7": counts(3, 2, [0, 1])}])


def test_completed_beyond_the_target_is_an_error() -> None:
    with pytest.raises(AgreementError, match="operation 3 is complete at a member, but another has contributed only 2"):
        targets([{"7": counts(3, 3, [0, 1])}, {"7": counts(2, 2, [0, 1])}])


def test_different_members_are_an_error() -> None:
    with pytest.raises(AgreementError, match="Communicator 7: its ranks report different members"):
        targets([{"7": counts(1, 1, [0, 1])}, {"7": counts(1, 1, [1, 0])}])


def test_more_reports_than_members_are_an_error() -> None:
    with pytest.raises(AgreementError, match="3 reports for its 2 members"):
        targets([{"7": counts(1, 1, [0, 1])}] * 3)


def test_equal_counts_pass_with_ranks_as_json_has_them() -> None:
    assert verify_completed([{"7": {"0": 4, "1": 4}}, {"7": {2: 4}, "9": {2: 0}}]) == {"7": 4, "9": 0}


def test_different_counts_name_communicator_and_ranks() -> None:
    with pytest.raises(AgreementError, match=r"Communicator 7: .*\(rank 0: 4, rank 1: 5\)") as caught:
        verify_completed([{"7": {0: 4}}, {"7": {1: 5}}])
    assert caught.value.code == "cut.counts-differ"
    assert caught.value.remedy


def test_a_rank_reported_twice_with_different_counts_is_an_error() -> None:
    with pytest.raises(AgreementError, match="Communicator 7: rank 0 is reported with 4 and with 5"):
        verify_completed([{"7": {0: 4}}, {"7": {0: 5}}])


def test_members_that_nobody_lists_count_zero() -> None:
    members = {"7": [0, 1]}
    assert verify_completed([{"7": {0: 0}}], members) == {"7": 0}
    with pytest.raises(AgreementError, match="rank 0: 1, rank 1: 0"):
        verify_completed([{"7": {0: 1}}], members)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8))
def test_target_lies_between_everybodys_counts(pairs: list[tuple[int, int]]) -> None:
    members = list(range(len(pairs)))
    reports = [{"7": counts(max(pair), min(pair), members)} for pair in pairs]
    smallest = min(max(pair) for pair in pairs)
    if max(min(pair) for pair in pairs) > smallest:
        with pytest.raises(AgreementError):
            targets(reports)
    else:
        assert targets(reports) == {"7": smallest}
