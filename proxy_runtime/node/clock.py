"""Where the time of a call went."""

from __future__ import annotations

import time


class Clock:
    """Names stretches of time, in milliseconds."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        """The time since the last lap belongs to this name."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + (now - self._since) * 1e3
        self._since = now
