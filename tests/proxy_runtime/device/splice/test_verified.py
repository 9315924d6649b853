"""The verified mode: what would have been shared is computed by every rank and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy_runtime.device.client import NativeBuild, Zygote
from tests.proxy_runtime.device.splice.programs import Rank, add_, mul_, together
from tests.proxy_runtime.device.splice.test_sharing import N, counters, step


@pytest.fixture
def zygote(
    request: pytest.FixtureRequest, device_build: NativeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Zygote]:
    """With the environment that the test is marked with."""
    monkeypatch.setenv("ERGO_SPLICE_VERIFY", "1")
    monkeypatch.setenv("ERGO_SPLICE_ERR", str(getattr(request, "param", 0)))
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


@pytest.mark.parametrize(("zygote", "compared"), [(0, 4), (1, 3), (2, 3)], indirect=["zygote"])
def test_an_operator_whose_results_differ_is_not_shared_any_more(job: Callable[..., Any], compared: int) -> None:
    """The engine is made to find a difference in the first or second comparison: of the sum, or of the product."""
    alone = together(job([0, 1]).ranks, update)
    running = job([0, 0])
    assert together(running.ranks, update) == alone
    counted = counters(running)
    assert counted["mismatches"] == (compared < 4)
    # Each of the two calls of that operator ran on both ranks, and the second was not even looked for.
    assert (counted["verified"], counted["executed"]) == (compared, 8)
