"""Unmodified scripts as ranks on device proxies print what they print natively over gloo: every bit."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import pytest
from launcher import Launcher, RankResult

from tests.proxy_runtime.rank.distributed.native import SCRIPTS, free_ports, run_native

pytestmark = pytest.mark.timeout(1300)
_DEADLINE_S = 600.0  # of each side, on a machine that has other things to do
_SCRIPTS = ("data_parallel", "sharded", "tensors", "pipelines", "groups")


def lines(results: list[RankResult]) -> list[list[str]]:
    for rank, result in enumerate(results):
        assert result.code == 0, f"rank {rank}:\n{result.out}\n{result.err[-3000:]}"
        assert result.out.endswith("end\n"), result.out
    return [result.out.splitlines() for result in results]


def compare(launcher: Launcher, name: str, scratch: Path, ranks: int, devices: int) -> None:
    def arguments(side: str) -> list[str]:
        (scratch / side).mkdir()
        return [str(scratch / side), str(free_ports(8))]

    launcher.deadline_s = _DEADLINE_S
    script = SCRIPTS / f"{name}.py"
    native = lines(run_native(script, *arguments("native"), ranks=ranks, deadline_s=_DEADLINE_S))
    results = launcher.run(script, *arguments("ours"), ranks=ranks, devices=devices)
    ours = lines(results)
    raised = [line for rank in ours for line in rank if " raised " in line]
    assert not raised, results[0].err[-3000:]
    pairs = [pair for both in zip(ours, native, strict=True) for pair in zip_longest(*both)]
    assert not [f"{mine} | natively {theirs}" for mine, theirs in pairs if mine != theirs]


def test_collectives(launcher: Launcher, tmp_path: Path) -> None:
    compare(launcher, "collectives", tmp_path, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", _SCRIPTS)
def test_two_ranks(launcher: Launcher, tmp_path: Path, name: str) -> None:
    compare(launcher, name, tmp_path, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["collectives", *_SCRIPTS])
def test_four_ranks_on_two_devices(launcher: Launcher, tmp_path: Path, name: str) -> None:
    """Natively the sums follow our tree."""
    compare(launcher, name, tmp_path, 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 3])
def test_three_ranks(launcher: Launcher, tmp_path: Path, devices: int) -> None:
    compare(launcher, "collectives", tmp_path, 3, devices)
