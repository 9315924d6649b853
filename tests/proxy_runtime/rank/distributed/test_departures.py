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


# What both ranks say; the operation's number and communicator are left out.
_BOTH_SAY = {
    "recv": r"rank 0 called Recv .* and waits in it for rank 1, rank 1 called AllReduce .* waits in it for rank 0",
    "broadcast_size": r"rank 0 called Broadcast \(root 0, 40 bytes of float32\) but rank 1 called Broadcast",
    "recv_size": r"rank 0 called Send \(group rank 1, 40 bytes of float32\) but rank 1 called Recv \(",
    "gather_size": r"rank (0 called AllGather with room for \d+ bytes of rank 1|1 .* of rank 0), which gave \d+",
}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 1])
@pytest.mark.parametrize("how", _BOTH_SAY)
def test_both_ranks_of_a_mismatch_say_what_was_called(launcher: Launcher, how: str, devices: int) -> None:
    for result in launcher.run(SCRIPTS / "departing.py", how, ranks=2, devices=devices):
        assert result.code == 1 and re.search(_BOTH_SAY[how], result.err), result.err


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 1])
def test_who_waits_in_the_store_for_a_rank_that_has_ended_is_told(launcher: Launcher, devices: int) -> None:
    launcher.deadline_s = 60.0  # the store's own timeout is 30 minutes
    _, second = launcher.run(SCRIPTS / "departing.py", "store", ranks=2, devices=devices)
    assert second.code == 1
    assert re.search(
        r"waits in the rendezvous store for the key \S*of rank 0, which nobody .* rank 0 has ended", second.err
    )


@pytest.mark.slow
@pytest.mark.parametrize(("how", "kind"), [("broadcast", "Broadcast"), ("size", "AllReduce")])
def test_ranks_that_call_different_things_are_both_named(launcher: Launcher, how: str, kind: str) -> None:
    for result in launcher.run(SCRIPTS / "departing.py", how, ranks=2):
        assert result.code == 1 and re.search(_DISAGREE.format(kind), result.err), result.err


def test_an_rpc_agent_is_refused(launcher: Launcher) -> None:
    (result,) = launcher.run(SCRIPTS / "rpc.py", ranks=1)
    assert result.code == 0 and result.out.count("init_rpc('worker') is not possible on Ergosphere") == 2, result


def test_sparse_gradients_raise_as_over_nccl(launcher: Launcher) -> None:
    for result in launcher.run(SCRIPTS / "sparse_gradients.py", ranks=2, devices=1):
        assert result.code == 0 and result.out == "raised\n", result
