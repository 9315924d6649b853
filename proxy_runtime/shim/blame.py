"""Which ranks have ended, and whose end was the reason of another's: a job's end is told by what began it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy_runtime.shim.generation import Rank

GRACE_S = 30.0
"""How long a rank that another one left alone is not judged: that one's exit handlers may take as long, and where it is
on another node, what that node says has to be heard."""

_LEFT_BY = re.compile(r"for rank (\d+), which has ended without it")  # as the device side says it (collectives_cut.cpp)


def left_by(error: str | None) -> int | None:
    """The rank that has ended while this one waited for it, by what this one was told; None where it was not."""
    found = _LEFT_BY.search(error or "")
    return int(found[1]) if found else None


@dataclass(slots=True)
class Blame:
    """Judges the ends of a generation's local ranks, each time that it is asked."""

    clock: Callable[[], float] = time.monotonic
    _judge_at: float | None = field(default=None, init=False)

    def ended(self, ranks: Sequence[Rank]) -> list[Rank]:
        """Those that have ended, first those that had no other's end as their reason.

        One that failed because another was ending is left out until that one has ended too: a process takes a moment
        to end, and the blame is its. One that failed because a rank of another node had ended is left out as long:
        its own node tells how and with what last words, and whoever hears of that ends this part.

        Args:
            ranks: all local ones.
        """
        found = [rank for rank in ranks if rank.exit is not None]
        late, here = any(rank.leaving for rank in ranks), {rank.rank for rank in ranks}
        unclear = {
            rank.rank
            for rank in found
            if rank.exit is not None and rank.exit.code != 0 and rank.bereft and (late or rank.left_by not in here)
        }
        if unclear and not self._is_time():
            found = [rank for rank in found if rank.rank not in unclear]
        return sorted(found, key=lambda rank: (rank.bereft, rank.rank))

    def _is_time(self) -> bool:
        now = self.clock()
        if self._judge_at is None:
            self._judge_at = now + GRACE_S
        return now >= self._judge_at
