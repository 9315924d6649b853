"""The reference of the basic tier, worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.leftover import shortest_first
from scheduling.simulator.workload import TraceJob


def jobs(*of):
    return [
        TraceJob(str(number), float(submit), float(duration), devices)
        for number, (submit, duration, devices) in enumerate(of)
    ]


@pytest.mark.parametrize(
    ("given", "capacity", "times"),
    [
        ([(0, 10, 1), (0, 20, 1)], [], [10, 30]),  # one after the other, the shorter first
        ([(0, 10, 1), (2, 3, 1)], [], [3, 13]),  # the newcomer has less left, and goes first
        ([(0, 10, 1), (8, 3, 1)], [], [5, 10]),  # now it has more left
        ([(0, 10, 1)], [(0.0, 0), (5.0, 1), (8.0, 0), (20.0, 1)], [27]),  # as devices come and go
        ([(0, 10, 1)], [(0.0, 0), (5.0, 0)], [15]),  # from the last on, all are there
        ([], [(0.0, 1)], []),
    ],
)
def test_on_one_device(given, capacity, times):
    assert sorted(shortest_first(jobs(*given), capacity, 1)) == times


def test_who_does_not_fit_is_passed_over():
    assert sorted(shortest_first(jobs((0, 5, 2), (0, 8, 1), (0, 6, 1)), [(0.0, 1), (10.0, 1)], 2)) == [6, 14, 19]


def test_a_job_that_never_fits_is_refused():
    with pytest.raises(ValueError, match="more than 1"):
        shortest_first(jobs((0, 1, 2)), [], 1)
