"""Who has died is in no checkpoint: cuts refuse, what is written says who had ended, nothing goes on without them."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from model.ids import NodeId, Step
from model.manifest import PartRef, RankParts, RankState
from model.runtime import CheckpointInput, NodeParts, RuntimeCode
from proxy_runtime.checkpoint.errors import DAMAGED, CheckpointError
from proxy_runtime.cut import living
from proxy_runtime.cut.cutter import Cutter
from proxy_runtime.node.commit import Committer
from proxy_runtime.node.errors import NodeError
from proxy_runtime.shim.claimants import End
from proxy_runtime.shim.restoring import Restoration
from proxy_runtime.shim.spec import CutReport, RankExit, RunError

STATES = tuple(RankState(rank=rank, step=Step(0)) for rank in range(2))
PART = PartRef(digest="ab" * 32, chunks=("ab" * 32,), tree_bytes=1, entries=1, bytes=1)


def generation(*exits: RankExit | None, dead: int | None = None, killed: End | None = None) -> Any:
    ranks = [
        SimpleNamespace(rank=n, exit=exit, bereft=False, attached=True, has_tree=True) for n, exit in enumerate(exits)
    ]
    found = MagicMock(ranks=ranks, claimants=SimpleNamespace(killed=killed))
    found.dead_proxy.return_value = dead
    found.living.side_effect = lambda: [rank for rank in ranks if rank.exit is None]
    return found


def a_moment_ago(seconds: float) -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) - seconds


def test_who_has_died_is_named() -> None:
    living.require_living(generation(None, RankExit(1, 0)))
    for lost, sentence in (
        (generation(None, RankExit(1, 137, 9)), "rank 1 was killed by SIGKILL"),
        (generation(RankExit(0, 3), None), "rank 0 exited with code 3"),
        (generation(None, dead=2), "the device proxy of device 2 has died"),
    ):
        with pytest.raises(RunError, match=sentence) as caught:
            living.require_living(lost)
        assert caught.value.code == "run.lost"


def test_a_tree_whose_process_was_killed_is_cut_once_its_launcher_has_let_that_pass() -> None:
    with pytest.raises(RunError, match="process 7 of its tree was killed by SIGSEGV"):
        living.require_living(generation(None, killed=End(7, 11, a_moment_ago(1))))
    living.require_living(generation(None, killed=End(7, 11, a_moment_ago(living.LAUNCHERS_S + 1))))


class Proxy:
    """Comes to the end of a step when it has been asked so often."""

    def __init__(self, reached_after: int, meanwhile: dict[int, Any]) -> None:
        self.asked, self._reached_after, self._meanwhile = 0, reached_after, meanwhile

    def stop(self, *, at_step: int | None = None, deadline_s: float) -> dict[str, Any]:
        if at_step is not None:
            self.asked += 1
            self._meanwhile.get(self.asked, lambda: None)()
        return {"reached": self.asked >= self._reached_after, "ranks": {}}

    def stats(self, **_: object) -> dict[str, Any]:
        return {"ranks": {}}


def stopped(proxies: list[Proxy], job: Any, *, given_up: bool = False) -> CutReport:
    job.proxies = dict(enumerate(proxies))
    report = CutReport(epoch=1)
    cutter = Cutter(job, MagicMock(), Path("nowhere"), report)
    cutter.stop(at_step=3, step_deadline_s=60, deadline_s=1, given_up=lambda: given_up)
    return report


def test_a_rank_that_dies_while_the_end_of_a_step_is_waited_for_ends_the_wait() -> None:
    job = generation(None, None)
    never = Proxy(100, {3: lambda: setattr(job.ranks[1], "exit", RankExit(1, 137, 9))})
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL"):
        stopped([never], job)
    assert never.asked == 3
    with pytest.raises(RunError, match="called off"):
        stopped([Proxy(100, {})], generation(None), given_up=True)


def test_proxies_that_stand_at_the_end_of_the_step_are_not_asked_again() -> None:
    fast, slow = Proxy(1, {}), Proxy(4, {})
    assert stopped([fast, slow], generation(None, None)).reached_step
    assert (fast.asked, slow.asked) == (1, 4)


@pytest.mark.parametrize("kind", ["live", "full"])
def test_no_checkpoint_is_committed_without_a_rank_that_died(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy_runtime.node.commit.device_of_rank", lambda _: (0, 0))
    record = MagicMock(job="job")
    record.spec.pack = "rank"
    fleet = MagicMock()
    committer = Committer(fleet, MagicMock(), record, MagicMock(), None)
    for ranks, why in (
        ((RankParts(rank=0, process=PART), RankParts(rank=1, device=PART)), "rank 1 has no process"),
        ((RankParts(rank=0, process=PART),), "rank 1 has no process"),
        ((RankParts(rank=0, process=PART), RankParts(rank=1, exit_code=137)), "it had ended with exit code 137"),
        ((RankParts(rank=0, exit_code=0), RankParts(rank=1, exit_code=0)), "every rank had ended"),
    ):
        request = CheckpointInput("job", 1, 1, kind, 60.0, commit=(NodeParts(NodeId("n", 1), ranks, STATES),))  # type: ignore[arg-type]
        with pytest.raises(NodeError, match=why) as caught:
            committer.commit(request)
        assert caught.value.code == RuntimeCode.UNKNOWN
    assert not fleet.mock_calls


def test_nothing_goes_on_from_a_checkpoint_whose_ranks_have_not_ended_well() -> None:
    for end in (RankParts(rank=1), RankParts(rank=1, exit_code=1), RankParts(rank=1, exit_code=137)):
        reader = MagicMock()
        reader.manifest.ranks = (RankParts(rank=0, process=PART), end)
        reader.manifest.header.pack = "rank"
        job = generation(None, None)
        with pytest.raises(CheckpointError, match="rank 1 has no process in it") as caught:
            Restoration(job, reader, MagicMock()).bring(deadline_s=1)
        assert caught.value.code == DAMAGED
        assert [rank.exit for rank in job.ranks] == [None, None]
