"""A rank that ends, or makes another call than its peers, leaves nobody waiting: they raise, and say for whom."""

from __future__ import annotations

import re

import pytest
from launcher import Launcher

from tests.proxy_runtime.rank.distributed.native import SCRIPTS

_ENDED = r"rank 1 waits in (AllReduce|Recv) \(number \d+ of communicator .*\) for rank 0, which has ended without it"
_DISAGREE = r"rank 0 called {} .* but rank 1 called AllReduce"


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 1])
@pytest.mark.parametrize("how", ["end", "exit_with_pending_work", "raise_with_pending_work"])
def test_a_rank_that_has_ended_is_named(launcher: Launcher, how: str, devices: int) -> None:
    first, second = launcher.run(SCRIPTS / "departing.py", how, ranks=2, devices=devices)
    assert first.code == (0 if how == "end" else 1), first.err
    assert second.code == 1 and re.search(_ENDED, second.err), second.err
    if how == "raise_with_pending_work":
        assert "ValueError: of the script" in first.err


@pytest.mark.slow
@pytest.mark.parametrize(("how", "kind"), [("broadcast", "Broadcast"), ("size", "AllReduce")])
def test_ranks_that_call_different_things_are_both_named(launcher: Launcher, how: str, kind: str) -> None:
    for result in launcher.run(SCRIPTS / "departing.py", how, ranks=2):
        assert result.code == 1 and re.search(_DISAGREE.format(kind), result.err), result.err
