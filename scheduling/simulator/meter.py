"""Counts a job's hours, and those that missed the level of its tier: for every policy alike, outside of all of them."""

from __future__ import annotations

HOUR_S = 3600.0
SHORT_HOUR_S = 600.0
"""A last hour that is shorter is not counted."""


class Meter:
    """Hours counted from `start`. Delivered time is told in pieces, in order.

    Attributes:
        hours, below: hours that were counted, and those below the level.
        excused: hours below the level that would have met it without what a failure took.
    """

    __slots__ = ("_at", "_delivered", "_end", "_lost", "_need", "_ranks", "below", "excused", "hours")

    def __init__(self, start: float, ranks: int, level: float) -> None:
        self._at = start
        self._end = start + HOUR_S
        self._ranks = ranks
        self._need = level
        self._delivered = 0.0
        self._lost = 0.0
        self.hours = self.below = self.excused = 0

    def advance(self, now: float, devices: int) -> None:
        """`devices` delivered from the last call to `now`."""
        while now >= self._end:
            self._delivered += devices * (self._end - self._at)
            self._at = self._end
            self._close(HOUR_S)
            self._end += HOUR_S
        self._delivered += devices * (now - self._at)
        self._at = now

    def lose(self, device_s: float, down_device_s: float) -> None:
        """A failure took back what was delivered, and costs some time in which nothing is."""
        self._delivered -= device_s
        self._lost += device_s + down_device_s

    def finish(self) -> None:
        """The job has ended at the time of the last call."""
        length = self._at - (self._end - HOUR_S)
        if length >= SHORT_HOUR_S:
            self._close(length)

    def _close(self, length: float) -> None:
        self.hours += 1
        needed = self._need * self._ranks * length * (1.0 - 1e-6)
        if self._delivered < needed:
            self.below += 1
            if self._delivered + self._lost >= needed:
                self.excused += 1
        self._delivered = self._lost = 0.0
