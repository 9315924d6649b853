"""A generation that takes over the processes of the one before: they stay, only their devices change.

A resize on one node moves device state and nothing else: what a rank knows of its device is its ring, which the next
proxy maps as the last one did. So no process is dumped, ended or restored, and what a process tree holds (loader
workers, connections, files) is neither copied nor looked at. The ranks run on meanwhile and wait for answers only.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from proxy_runtime.channel.ring import Ring
from proxy_runtime.cut.dumped import device_files
from proxy_runtime.shim.claimants import Claimants
from proxy_runtime.shim.generation import Generation, Rank, in_parallel, require_same_counts
from proxy_runtime.shim.restoring import load


class Reattachment:
    """Gives the ranks of a stopped generation to the proxies of a fresh one, which are forked and connected.

    Until `commit` the old proxies have all that they had, and nothing has been taken from a ring: `refuse` leaves the
    old generation as it was.
    """

    def __init__(self, old: Generation, fresh: Generation) -> None:
        self._old = old
        self._fresh = fresh
        self._of_ended: list[Ring] = []
        self.timings: dict[str, float] = {}  # milliseconds, by phase

    def bring(self, dumped: Path, *, deadline_s: float) -> dict[int, dict[str, Any]]:
        """Attaches the rings and loads what `Cutter.dump_devices` has written to `dumped`.

        Returns:
            Per local rank: sequence -> `contributed`, `completed`, `members`.

        Raises:
            ErgoError: an inconsistent cut, a proxy that died, a deadline. `refuse` comes next.
        """
        clock = time.perf_counter()
        fresh = self._fresh
        fresh.ranks = [rank if rank.exit is None else self._ended(rank) for rank in self._old.ranks]
        fresh.attach()
        loaded = in_parallel(
            [lambda rank=rank: load(fresh, rank, device_files(dumped, rank.rank), deadline_s) for rank in fresh.ranks]
        )
        counts = {rank.rank: each for rank, each in zip(fresh.ranks, loaded, strict=True)}
        require_same_counts(counts)
        self._note(clock)
        return counts

    def take(self) -> None:
        """What the old generation had is the fresh one's from here on; its proxies are ended."""
        clock = time.perf_counter()
        old, fresh = self._old, self._fresh
        kept = {id(rank) for rank in fresh.ranks}
        for rank in old.ranks:
            if id(rank) not in kept and rank.ring is not None:
                rank.ring.close()
        fresh.volume, fresh.claimants = old.volume, old.claimants
        old.volume, old.claimants, old.ranks = None, Claimants(), []
        ending, old.proxies = old.proxies, {}  # by nobody else: whoever ends the old generation may come at any moment
        in_parallel([proxy.kill for proxy in ending.values()])
        self._note(clock)

    def go(self) -> None:
        """Lets the fresh proxies execute, as the old ones do not wait beside them any more."""
        clock = time.perf_counter()
        self._fresh.start()
        for rank in self._fresh.ranks:
            if rank.ring is not None:
                rank.ring.wake_rank()  # it may have gone to sleep under the old proxy
        self._note(clock)

    def refuse(self) -> None:
        """Ends the fresh generation and leaves the ranks alone. Not after `take`."""
        self._fresh.ranks = []
        for ring in self._of_ended:
            ring.close()
        self._fresh.kill()

    def _ended(self, rank: Rank) -> Rank:
        """A rank that has exited, as a checkpoint has it: others may need what it has left in its ring."""
        unread = rank.ring.unread() if rank.ring is not None else b""
        ring = Ring.of_ended(rank.rank, rank.step, unread, self._fresh.build.id)
        self._of_ended.append(ring)
        return Rank(rank.rank, ring, rank.container, rank.exit, rank.last_step)

    def _note(self, since: float) -> None:
        self.timings["reconnect"] = self.timings.get("reconnect", 0.0) + (time.perf_counter() - since) * 1e3
