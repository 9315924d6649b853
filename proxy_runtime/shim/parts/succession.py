"""The next epoch of a job on nodes where every rank stays: it takes over the processes of the part before.

Both parts are in one shim. Up to `take` the one before has all that it had: should its cut be called off, by whomever,
it runs on. From `take` on the processes are the successor's, and go on with its proxies or not at all.
"""

from __future__ import annotations

import threading
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from model.manifest import RankState
from proxy_runtime.shim.reattaching import Reattachment
from proxy_runtime.shim.spec import RunError

if TYPE_CHECKING:
    from proxy_runtime.shim.parts.job import PartJob


class _State(Enum):
    COMING = auto()
    READY = auto()
    TAKEN = auto()
    REFUSED = auto()


class Succession:
    """Fills a prepared generation, whose proxies are forked and connected, from the devices of the part before.

    As `Restoration` does from a checkpoint: after `bring` all is there and nothing runs; then either `go` or `refuse`.
    Thread-safe.

    Attributes:
        saved: where the ranks stood at the cut.
        timings: milliseconds, by phase.
    """

    def __init__(self, before: PartJob, successor: PartJob, cut: int) -> None:
        if before.generation is None or successor.generation is None:
            raise RunError("a part that is not prepared has no processes.", code="run.order")
        self._before, self._successor = before, successor
        self._cut = cut
        self._reattachment = Reattachment(before.generation, successor.generation)
        self._lock = threading.Lock()
        self._state = _State.COMING
        self.saved: tuple[RankState, ...] = ()
        self.timings: dict[str, float] = {}

    def bring(self, *, deadline_s: float) -> dict[int, dict[str, Any]]:
        """Dumps the devices at the cut, which is finished, and loads the fresh ones. Counts per local rank.

        Raises:
            ErgoError: the cut is over, an inconsistent one, a proxy that died, a deadline. `refuse` comes next.
        """
        dumped = self._before.cuts.dump_devices(self._cut, deadline_s=deadline_s)
        self.saved = dumped.states
        counts = self._reattachment.bring(dumped.scratch, deadline_s=deadline_s)
        with self._lock:
            if self._state is not _State.COMING:
                raise _too_late()
            self._state = _State.READY
        self.timings = {"device": dumped.ms, **self._reattachment.timings}
        return counts

    def take(self) -> bool:
        """The processes are the successor's from here on. False where it was not ready, and never will be."""
        with self._lock:
            if self._state is _State.READY:
                self._state = _State.TAKEN
                self._successor.inherit(self._before.hand_over(self._reattachment.take))
            elif self._state is _State.COMING:
                self._refuse()
            return self._state is _State.TAKEN

    def go(self) -> None:
        """Lets the ranks run.

        Raises:
            RunError: the job runs on as it was.
        """
        if not self.take():
            raise _too_late()
        self._reattachment.go()

    def refuse(self) -> bool:
        """Leaves the processes to the part before. False where they were taken."""
        with self._lock:
            if self._state in (_State.COMING, _State.READY):
                self._refuse()
            return self._state is _State.REFUSED

    def _refuse(self) -> None:
        self._state = _State.REFUSED
        self._reattachment.refuse()


def _too_late() -> RunError:
    return RunError("the cut was called off, and the job runs on as it was.", code="run.called-off")
