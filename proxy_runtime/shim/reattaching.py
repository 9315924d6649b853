"""A generation that takes over processes of the one before: they stay, only their devices change.

A resize on one node moves device state and nothing else: what a rank knows of its device is its ring, which the next
proxy maps as the last one did. So no process is dumped, ended or restored, and what a process tree holds (loader
workers, connections, files) is neither copied nor looked at. Where no rank comes or leaves they even run on meanwhile,
and wait for answers only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proxy_runtime.channel.ring import Ring
from proxy_runtime.shim.claimants import Claimants
from proxy_runtime.shim.generation import Generation, Rank
from proxy_runtime.shim.restoring import load_all
from proxy_runtime.shim.workers import in_parallel


class Reattachment:
    """Gives the ranks of a stopped generation to the proxies of a fresh one, which are forked and connected.

    Until `take` the old proxies have all that they had, and nothing has been taken from a ring: `refuse` leaves the
    old generation as it was.

    Attributes:
        come: ranks of the fresh generation that the old one does not have.
    """

    def __init__(self, old: Generation, fresh: Generation) -> None:
        self._old = old
        self._fresh = fresh
        self._of_ended: list[Ring] = []
        numbers = {rank.rank for rank in old.ranks}
        self.come = [rank for rank in fresh.ranks if rank.rank not in numbers]
        self.timings: dict[str, float] = {}  # milliseconds, by phase

    def adopt(self) -> None:
        """The ranks that stay are the fresh generation's too, and so are the mounts; `take` or `refuse` come next."""
        old = {rank.rank: rank for rank in self._old.ranks}
        self._fresh.ranks = [self._adopted(old.get(rank.rank, rank)) for rank in self._fresh.ranks]
        self._fresh.volume = self._old.volume

    def bring(self, files: Callable[[Rank], Path], *, deadline_s: float) -> dict[int, dict[str, Any]]:
        """Attaches the rings and loads what was dumped of every rank; `files` says where.

        Returns:
            Per local rank: sequence -> `contributed`, `completed`, `members`.

        Raises:
            ErgoError: an inconsistent cut, a proxy that died, a deadline. `refuse` comes next.
        """
        clock = time.perf_counter()
        self._fresh.attach()
        counts = load_all(self._fresh, files, deadline_s)
        self._note(clock)
        return counts

    def take(self) -> None:
        """What the old generation had is the fresh one's from here on; its proxies, and who leaves, are ended."""
        clock = time.perf_counter()
        old, fresh = self._old, self._fresh
        staying = {rank.rank: rank for rank in fresh.ranks}
        leaving = [rank for rank in old.ranks if rank.rank not in staying]
        for rank in old.ranks:
            if rank.rank in staying and rank is not staying[rank.rank] and rank.ring is not None:
                rank.ring.close()
        fresh.volume, fresh.claimants = old.volume, old.claimants
        old.volume, old.claimants, old.ranks = None, Claimants(), []
        ending, old.proxies = old.proxies, {}  # by nobody else: whoever ends the old generation may come at any moment
        in_parallel([*(proxy.kill for proxy in ending.values()), lambda: old.kill_ranks(leaving)])
        self._note(clock)

    def go(self) -> None:
        """Lets the fresh proxies execute, as the old ones do not wait beside them any more, and held ranks run."""
        clock = time.perf_counter()
        self._fresh.start()
        staying = [rank for rank in self._fresh.ranks if not self._comes(rank)]
        for rank in staying:
            if rank.ring is not None:
                rank.ring.wake_rank()  # it may have gone to sleep under the old proxy
        if self._old.held:
            self._fresh.let_go(rank for rank in staying if rank.alive)
        self._note(clock)

    def abort(self) -> None:
        """Whoever waits for the fresh proxies does so in vain from now on."""
        in_parallel([proxy.kill for proxy in self._fresh.proxies.values()])

    def refuse(self) -> None:
        """Ends the fresh generation and leaves the ranks alone. Idempotent; not after `take`."""
        self._fresh.ranks, self._fresh.volume = [*self.come], None
        for ring in self._of_ended:
            ring.close()
        self._fresh.kill()

    def _adopted(self, rank: Rank) -> Rank:
        return rank if rank.exit is None or self._comes(rank) else self._ended(rank)

    def _comes(self, rank: Rank) -> bool:
        return any(rank is one for one in self.come)

    def _ended(self, rank: Rank) -> Rank:
        """A rank that has exited, as a checkpoint has it: others may need what it has left in its ring."""
        unread = rank.ring.unread() if rank.ring is not None else b""
        ring = Ring.of_ended(rank.rank, rank.step, unread, self._fresh.build.id)
        self._of_ended.append(ring)
        return Rank(rank.rank, ring, rank.container, rank.exit, rank.last_step)

    def _note(self, since: float) -> None:
        self.timings["reconnect"] = self.timings.get("reconnect", 0.0) + (time.perf_counter() - since) * 1e3
