"""Ranks that go from the proxies of one generation to those of the next, or stay where they were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from proxy_runtime.channel.ring import Ring
from proxy_runtime.cut.agreement import AgreementError
from proxy_runtime.cut.dumped import device_files
from proxy_runtime.errors import ErgoError
from proxy_runtime.shim.generation import Generation, Rank
from proxy_runtime.shim.reattaching import Reattachment
from proxy_runtime.shim.spec import RankExit

GONE = ErgoError("the device proxy has ended.", code="device-proxy.gone")


@dataclass
class Proxy:
    """Notes what it was asked for, together with all others."""

    name: str
    asked: list[tuple[str, ...]]
    completed: int = 5
    fails: str = ""
    unread: dict[int, bytes] = field(default_factory=dict[int, bytes])

    def attach(self, rank: int, fd: int) -> None:
        with Ring(os.dup(fd)) as ring:
            self.unread[rank] = ring.unread()
        self._note("attach", str(rank))

    def load(self, rank: int, meta: Path, storages: Path, *, deadline_s: float) -> dict[str, Any]:
        self._note("load", str(rank), f"{meta.parent.parent.name}/{meta.parent.name}/{meta.name}", storages.name)
        return {"counts": {"7": {"completed": self.completed}}}

    def run(self) -> None:
        self._note("run")

    def kill(self) -> None:
        self._note("kill")

    def _note(self, *what: str) -> None:
        self.asked.append((self.name, *what))
        if what[0] == self.fails:
            raise GONE


def generation(ranks: list[Rank], placement: tuple[int, ...], proxies: dict[int, Proxy]) -> Generation:
    made = Generation(
        cast(Any, SimpleNamespace(pack="rank", world_size=2)), 0, MagicMock(), MagicMock(id=""), 1, placement
    )
    made.ranks, made.proxies, made.volume = ranks, cast(Any, proxies), MagicMock()
    return made


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    """Rank 0 runs, rank 1 has ended."""
    made = [Rank(0, Ring.create(0), MagicMock()), Rank(1, Ring.create(1), MagicMock(), RankExit(1, 0), last_step=9)]
    rings = [cast(Ring, rank.ring) for rank in made]
    yield made
    for ring in rings:
        ring.close()


def test_ranks_are_taken_over_before_the_old_proxies_end(ranks: list[Rank], tmp_path: Path) -> None:
    asked: list[tuple[str, ...]] = []
    old = generation(ranks, (0, 1), {0: Proxy("old 0", asked), 1: Proxy("old 1", asked)})
    proxy = Proxy("new", asked)
    fresh = generation([Rank(0), Rank(1)], (0, 0), {0: proxy})
    volume, before = old.volume, list(ranks)
    reattachment = Reattachment(old, fresh)
    reattachment.adopt()
    reattachment.bring(lambda rank: device_files(tmp_path, rank.rank), deadline_s=1.0)
    assert sorted(asked) == sorted(
        [("new", "attach", "0"), ("new", "attach", "1"),
         ("new", "load", "0", "rank-0/device/meta", "storages"), ("new", "load", "1", "rank-1/device/meta", "storages")]
    )  # fmt: skip
    assert proxy.unread[0] == b"" and len(proxy.unread[1]) == 8, "who has ended says so to the new proxy, too"
    assert old.ranks == before and old.volume is volume
    del asked[:]
    reattachment.take()
    assert fresh.ranks[0] is before[0] and before[0].ring is not None and before[0].ring.fd >= 0
    assert (fresh.ranks[1].exit, fresh.ranks[1].last_step) == (before[1].exit, 9)
    assert cast(Ring, before[1].ring).fd < 0
    assert (old.ranks, old.volume, fresh.volume) == ([], None, volume)
    assert {each[:2] for each in asked} == {("old 0", "kill"), ("old 1", "kill")}
    old.kill()  # whoever ends the epoch before may come first
    reattachment.go()
    assert asked[2:] == [("new", "run")]
    cast(MagicMock, before[0].container).kill.assert_not_called()
    cast(Ring, fresh.ranks[1].ring).close()


@pytest.mark.parametrize("fails", ["attach", "load", "another count"])
def test_what_fails_leaves_the_ranks_where_they_were(fails: str, ranks: list[Rank], tmp_path: Path) -> None:
    asked: list[tuple[str, ...]] = []
    old = generation(ranks, (0, 1), {0: Proxy("old 0", asked), 1: Proxy("old 1", asked)})
    made = {0: Proxy("new 0", asked), 1: Proxy("new 1", asked, fails=fails)}
    if fails == "another count":
        made[1].completed = 6
    fresh = generation([Rank(0), Rank(1)], (0, 1), made)
    fresh.volume = None
    reattachment = Reattachment(old, fresh)
    with pytest.raises(AgreementError if fails == "another count" else ErgoError):
        reattachment.adopt()
        reattachment.bring(lambda rank: device_files(tmp_path, rank.rank), deadline_s=1.0)
    left = [cast(Ring, rank.ring) for rank in fresh.ranks]
    reattachment.refuse()
    assert {("new 0", "kill"), ("new 1", "kill")} <= set(asked)
    assert not [each for each in asked if each[0].startswith("old")]
    assert old.ranks is ranks and old.volume is not None
    assert all(cast(Ring, rank.ring).fd >= 0 for rank in ranks)
    assert left[0] is ranks[0].ring and left[1].fd < 0
    for rank in ranks:
        cast(MagicMock, rank.container).kill.assert_not_called()


def test_a_proxy_that_dies_when_it_is_to_run_is_told(ranks: list[Rank], tmp_path: Path) -> None:
    """After the commit there is no way back: the monitor ends the job as it does at any other time."""
    asked: list[tuple[str, ...]] = []
    old = generation(ranks, (0, 1), {0: Proxy("old 0", asked), 1: Proxy("old 1", asked)})
    fresh = generation([Rank(0), Rank(1)], (0, 0), {0: Proxy("new", asked, fails="run")})
    reattachment = Reattachment(old, fresh)
    reattachment.adopt()
    reattachment.bring(lambda rank: device_files(tmp_path, rank.rank), deadline_s=1.0)
    reattachment.take()
    with pytest.raises(ErgoError, match="has ended"):
        reattachment.go()
    assert [rank.rank for rank in fresh.ranks] == [0, 1]
    cast(Ring, fresh.ranks[1].ring).close()
