"""The proxy's benchmarks: what they conclude from given times, and that both sides answer and do the same work."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness import BenchmarkError, Condition, Paired
from benchmarks.proxy import compare, sides


def test_interval_holds_the_median_and_narrows_with_more_samples() -> None:
    few, many = [1.0, 1.1, 1.2], [1.0, 1.1, 1.2] * 20
    low, high = compare.interval(few)
    assert low <= 1.1 <= high
    assert (compare.interval(many)[1] - compare.interval(many)[0]) <= high - low
    assert compare.interval(few) == compare.interval(few)


def test_ratio_is_proxied_over_native() -> None:
    figure = compare.ratio("proxy.x", Paired((1.0, 2.0, 4.0), (2.0, 2.0, 4.0)), Condition("<=", 1.01), steps=5)
    assert figure.value == 1.0
    assert figure.holds
    assert figure.details["native"] == 2.0
    assert figure.details["interval_95"] == [1.0, 2.0]
    assert figure.details["steps"] == 5


@pytest.mark.parametrize(("each_s", "calls"), [(0.01, 20), (0.3, 1)])
def test_windows_have_about_the_length_asked_for(each_s: float, calls: int) -> None:
    tried: list[int] = []

    def one(n: int) -> float:
        tried.append(n)
        return n * each_s

    assert compare.windows_of(0.2, one) == calls
    assert tried == [2**i for i in range(len(tried))]


def test_both_sides_make_the_same_steps(tmp_path: Path) -> None:
    with (
        sides.native("steps.py", "mlp", scratch=tmp_path) as ours,
        sides.proxied("steps.py", "mlp", scratch=tmp_path) as theirs,
    ):
        digests = []
        for side in (ours, theirs):
            assert side.ask("window", steps=3)[0]["seconds"] > 0
            digests.append(side.ask("digest")[0])
        assert digests[0]["digest"] == digests[1]["digest"]
        assert digests[0]["stats"] == {}
        assert digests[1]["stats"]["defined"] > 0
        assert theirs.cpu_s() > 0


def test_a_side_that_ends_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with (
        sides.native("steps.py", "no such model", scratch=tmp_path) as side,
        pytest.raises(BenchmarkError, match=r"(?s)has ended.*KeyError"),
    ):
        side.ask("window", steps=1)
