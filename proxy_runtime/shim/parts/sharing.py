"""What the proxies of a part tell of ranks that share their devices: the incidents among it."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress

from model.sharing import SharingIncidents
from proxy_runtime.device.errors import DeviceProxyError
from proxy_runtime.shim.generation import Generation

LOOK_S = 2.0
"""A proxy answers between two operators of its ranks: it is not asked more often."""

ANSWER_S = 1.0


class SharingWatch:
    """Counts the incidents of one part, over its devices. Thread-safe."""

    def __init__(self) -> None:
        self._at = float("-inf")
        self._found: dict[int, SharingIncidents] = {}

    @property
    def found(self) -> SharingIncidents | None:
        """All so far; None for none."""
        found = list(self._found.values())
        total = SharingIncidents(
            sum(one.time_limits for one in found),
            sum(one.mismatches for one in found),
            tuple(sorted({name for one in found for name in one.unshared})),
        )
        return total if total else None

    def look(self, generation: Generation, *, now: bool = False) -> None:
        """Asks the proxies that serve several ranks, where the last time is a while ago or it has to be `now`."""
        if generation.spec.pack == "node" or (not now and time.monotonic() < self._at + LOOK_S):
            return
        ranks = Counter(generation.placement[rank.rank] for rank in generation.ranks)
        for device, proxy in list(generation.proxies.items()):
            if ranks[device] < 2:
                continue
            with suppress(DeviceProxyError):  # of one that is gone, or busy: what it has told before holds
                told = proxy.stats(deadline_s=ANSWER_S).get("splice")
                if told:
                    self._found[device] = SharingIncidents(
                        int(told["timeouts"]), int(told["mismatches"]), tuple(told.get("unshared", ()))
                    )
        self._at = time.monotonic()
