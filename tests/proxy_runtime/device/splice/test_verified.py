"""The verified mode: what would have been shared is computed by every rank and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy_runtime.device.client import NativeBuild, Zygote
from tests.proxy_runtime.device.splice.programs import Rank, add_, mul_, sin, together, zero_
from tests.proxy_runtime.device.splice.test_sharing import N, counters, step


@pytest.fixture
def zygote(
    request: pytest.FixtureRequest, device_build: NativeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Zygote]:
    """Of which a test chooses one of how many results are compared, and which comparison finds a difference."""
    rate, differs = getattr(request, "param", (1, 0))
    monkeypatch.setenv("ERGO_SPLICE_VERIFY", str(rate))
    monkeypatch.setenv("ERGO_SPLICE_ERR", str(differs))
    with Zygote.start(device_build, "cpu", log=tmp_path / "zygote.log") as started:
        yield started


def test_every_result_is_compared_and_then_shared(job: Callable[..., Any]) -> None:
    alone = together(job([0, 1]).ranks, step)
    running = job([0, 0])
    assert together(running.ranks, step) == alone
    counted = counters(running)
    assert counted["verified"] >= 9
    assert counted["mismatches"] == 0
    assert counted["executed"] == 18
    assert counted["physical_bytes"] == 2 * 4 * N
    assert counted["copies"] == 0  # those of the comparison are not the job's


def update(rank: Rank, index: int) -> list[bytes]:
    """Two operators in turn on values that all ranks have."""
    rank.producer.write_floats(1, [1.0] * N)
    rank.producer.write_floats(2, [0.25 * index + 0.5] * N)
    rank.all_reduce(2, N)
    found = b""
    for _ in range(2):
        rank.run(add_(1, 2, N))
        rank.write(1, [2.0] * N)  # whatever came of it
        rank.run(mul_(1, 2, N))
        found = rank.producer.read(1, 4 * N)
        rank.write(1, [1.0] * N)
    return [found]


@pytest.mark.parametrize(("zygote", "compared"), [((1, 0), 4), ((1, 1), 3), ((1, 2), 3)], indirect=["zygote"])
def test_an_operator_whose_results_differ_is_not_shared_any_more(job: Callable[..., Any], compared: int) -> None:
    """The engine is made to find a difference in the first or second comparison: of the sum, or of the product."""
    alone = together(job([0, 1]).ranks, update)
    running = job([0, 0])
    assert together(running.ranks, update) == alone
    counted = counters(running)
    assert counted["mismatches"] == (compared < 4)
    # Each of the two calls of that operator ran on both ranks, and the second was not even looked for.
    assert (counted["verified"], counted["executed"]) == (compared, 8)


SIZES = (1, 64, 64 * 64)  # floats: how often each was merged with its equal can be told from the bytes of all
ROUNDS = 48


def three(rank: Rank, index: int) -> None:
    """The same three operators in every round, as a training has them in every step; all results are kept."""
    most = 2 * ROUNDS * sum(SIZES)  # more than will ever be there again
    rank.producer.alloc(1, 4 * most)
    rank.run(zero_(1, most))
    rank.producer.free(1)
    for number, size in enumerate(SIZES, start=2):
        rank.producer.write_floats(number, [0.5] * size)
    for _ in range(ROUNDS):
        for number, size in enumerate(SIZES, start=2):
            rank.run(sin(number, size), results=1)
    rank.producer.sync()


@pytest.mark.parametrize("zygote", [(3, 0)], indirect=True)
def test_samples_are_not_always_of_the_same_operator(job: Callable[..., Any]) -> None:
    """As many operators are compared as are in a round: at a fixed distance it would be one of the three for ever."""
    running = job([0, 0])
    together(running.ranks, three)
    counted = counters(running)
    floats, compared = counted["merged_bytes"] // 4, []
    for size in reversed(SIZES):
        compared.append(floats // size)
        floats %= size
    assert sum(compared) == counted["verified"]
    assert all(compared), compared
