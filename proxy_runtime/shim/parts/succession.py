"""The next epoch of a job on a node where ranks stay: it takes over the processes of the part before.

Both parts are in one shim. Up to `take` the one before has all that it had: should its cut be called off, by whomever,
it runs on. From `take` on the processes are the successor's, and go on with its proxies or not at all. Ranks that come
from other nodes are restored beside those that stay; what has changed elsewhere in the job's directory comes with them.
"""

from __future__ import annotations

import threading
from collections import Counter
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.manifest import RankState
from proxy_runtime.checkpoint.patch import VolumePatch
from proxy_runtime.checkpoint.reader import CheckpointReader
from proxy_runtime.cut.dumped import device_files
from proxy_runtime.errors import ErgoError
from proxy_runtime.shim.generation import Generation, Rank
from proxy_runtime.shim.parts.cuts import DumpedDevices
from proxy_runtime.shim.reattaching import Reattachment
from proxy_runtime.shim.restoring import Restoration
from proxy_runtime.shim.spec import RunError

if TYPE_CHECKING:
    from proxy_runtime.shim.parts.job import PartJob


class _State(Enum):
    COMING = auto()
    READY = auto()
    TAKEN = auto()
    REFUSED = auto()


class Succession:
    """Fills a prepared generation, whose proxies are forked and connected, from the part before.

    As `Restoration` does from a checkpoint: after `bring` all is there and nothing runs; then either `go` or `refuse`.
    Thread-safe.

    Attributes:
        saved: where the ranks stood at the cut.
        timings: milliseconds, by phase.
    """

    def __init__(self, before: PartJob, successor: PartJob, cut: int, reader: CheckpointReader | None = None) -> None:
        """`reader`, of a checkpoint of what has left all nodes, is needed where ranks come or leave."""
        if before.generation is None or successor.generation is None:
            raise RunError("a part that is not prepared has no processes.", code="run.order")
        if reader is None and before.part.ranks != successor.part.ranks:
            raise RunError("a rank that comes is in no checkpoint.", code="run.bad-spec")
        self._before, self._successor = before, successor
        self._generation: Generation = successor.generation
        self._cut = cut
        self._reader = reader
        self._reattachment = Reattachment(before.generation, successor.generation)
        self._arrivals: Restoration | None = None
        if reader is not None:
            self._arrivals = Restoration(successor.generation, reader, successor.tool(), ranks=self._reattachment.come)
        self._patch: VolumePatch | None = None
        self._lock = threading.Lock()
        self._bringing = threading.Lock()
        self._state = _State.COMING
        self.saved: tuple[RankState, ...] = ()
        self.timings: dict[str, float] = {}

    def bring(self, *, deadline_s: float) -> dict[int, dict[str, Any]]:
        """Dumps the devices at the cut, which is finished, and loads the fresh ones. Counts per local rank.

        Raises:
            ErgoError: the cut is over, an inconsistent one, a damaged checkpoint, a proxy that died, a deadline.
                `refuse` comes next.
        """
        dumped = self._before.cuts.dump_devices(self._cut, deadline_s=deadline_s)
        with self._bringing:
            self._require_wanted()
            self._reattachment.adopt()
            if self._arrivals is not None and self._reader is not None:
                self._patch = self._make_patch(dumped, self._reader)
                self._arrivals.processes(self._patch.apply, deadline_s=deadline_s)
                self._successor.event("brought", **Counter(self._arrivals.origins))
            counts = self._reattachment.bring(lambda rank: self._files(rank, dumped), deadline_s=deadline_s)
        with self._lock:
            self._require_wanted()
            self._state = _State.READY
        self.saved = self._stood(dumped)
        arrived = self._arrivals.timings if self._arrivals is not None else {}
        self.timings = {"device": dumped.ms, **arrived, **self._reattachment.timings}
        return counts

    def take(self) -> bool:
        """The processes are the successor's from here on. False where it was not ready, and never will be."""
        with self._lock:
            if self._state is _State.READY:
                self._state = _State.TAKEN
                self._successor.inherit(self._before.hand_over(self._reattachment.take))
        return not self.refuse()

    def go(self) -> None:
        """Lets the ranks run.

        Raises:
            RunError: the job runs on as it was.
        """
        if not self.take():
            raise _too_late()
        if self._patch is not None:
            self._patch.close()
        self._reattachment.go()
        if self._arrivals is not None:
            self._arrivals.release()
            self._arrivals.discard()

    def refuse(self) -> bool:
        """Leaves the processes to the part before, and the directory as it was. False where they were taken."""
        with self._lock:
            if self._state in (_State.COMING, _State.READY):
                self._state = _State.REFUSED
                self._reattachment.abort()
            refused = self._state is _State.REFUSED
        if refused:
            self._withdraw()
        return refused

    # ------------------------------------------------------------------ what they consist of

    def _withdraw(self) -> None:
        """Idempotent. Whoever comes second waits for the first: the ranks must not run in a directory half undone."""
        with self._bringing:
            if self._arrivals is not None:
                self._arrivals.refuse()
            self._reattachment.refuse()
            if self._arrivals is not None:
                self._arrivals.discard()
            if self._patch is not None:
                try:
                    self._patch.undo()
                except ErgoError as error:  # it must not go on with other files than it had
                    self._before.lose(error.message)

    def _require_wanted(self) -> None:
        if self._state is not _State.COMING:
            raise _too_late()

    def _make_patch(self, dumped: DumpedDevices, reader: CheckpointReader) -> VolumePatch:
        old = self._before.generation
        if dumped.volume is None or old is None or old.volume is None:
            raise RunError(f"what leaves at cut {self._cut} was not written.", code="run.order")
        layout = self._generation.layout
        return VolumePatch(
            reader,
            self._successor.open_store().exchange.tree(dumped.volume),
            directory=Path(f"/proc/{old.volume.init_pid}/root{self._successor.spec.cwd}"),
            upper=layout.upper,
            private=layout.private,
            journal=layout.undo(self._generation.epoch),
        )

    def _files(self, rank: Rank, dumped: DumpedDevices) -> Path:
        if self._arrivals is not None and any(rank is one for one in self._reattachment.come):
            return self._arrivals.device_files(rank)
        return device_files(dumped.scratch, rank.rank)

    def _stood(self, dumped: DumpedDevices) -> tuple[RankState, ...]:
        """Of those that stay as they were dumped, of the others as the checkpoint has it."""
        here = {state.rank: state for state in dumped.states}
        elsewhere = self._reader.manifest.header.ranks if self._reader is not None else ()
        return tuple(here.get(rank) or elsewhere[rank] for rank in self._successor.part.ranks)


def _too_late() -> RunError:
    return RunError("the cut was called off, and the job runs on as it was.", code="run.called-off")
