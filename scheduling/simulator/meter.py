"""Counts a job's hours, and those that missed the level of its tier: for every policy alike, outside of all of them."""

from __future__ import annotations

from scheduling.core.service import SHORT_HOUR_S
from scheduling.core.settings import HOUR_S


class Meter:
    """Hours counted from `start`. Delivered time is told in pieces, in order.

    The hour in which a job ends may be judged in two ways: whether it was kept waiting for longer than its level allows
    in an hour (that is all that anybody can promise who does not know when it ends), or by its share of that part.

    Attributes:
        hours: hours that were counted; `below` of them missed the level, a last part by what an hour allows.
        short_below: last parts that missed it by their own length, and are not in `below`.
        excused: hours below the level that would have met it without what a failure took.
    """

    __slots__ = ("_at", "_delivered", "_end", "_lost", "_need", "_ranks", "below", "excused", "hours", "short_below")

    def __init__(self, start: float, ranks: int, level: float) -> None:
        self._at = start
        self._end = start + HOUR_S
        self._ranks = ranks
        self._need = level
        self._delivered = 0.0
        self._lost = 0.0
        self.hours = self.below = self.excused = self.short_below = 0

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
        asked = self._ranks * length
        allowed = (1.0 - self._need) * self._ranks * HOUR_S * (1.0 + 1e-6)
        missing = asked - self._delivered
        if missing > allowed:
            self.below += 1
            self.excused += missing - self._lost <= allowed
        elif missing > allowed * length / HOUR_S:
            self.short_below += 1
        self._delivered = self._lost = 0.0
