"""A generation, or some ranks of one, from a checkpoint: files, processes (paused), device state, then run."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from model.manifest import why_lost, why_over
from proxy_runtime.checkpoint.errors import DAMAGED, CheckpointError
from proxy_runtime.checkpoint.parts import Part
from proxy_runtime.checkpoint.reader import CheckpointReader
from proxy_runtime.cut.dumped import AtHand, device_files, process_files
from proxy_runtime.errors import ErgoError
from proxy_runtime.process.criu_setup import Criu
from proxy_runtime.shim import ahead
from proxy_runtime.shim.generation import Generation, Rank, require_same_counts
from proxy_runtime.shim.spec import RankExit, RunError
from proxy_runtime.shim.workers import in_background, in_parallel


class Restoration:
    """Fills a prepared generation, whose proxies are forked and connected, from a checkpoint.

    Loading contributes pending operations again, so the proxies must have been connected before. After `bring` all
    ranks are restored and paused and the proxies loaded; then either `go` or `refuse`. Whoever restores only some of
    the ranks calls the steps of `bring`.
    """

    def __init__(
        self,
        generation: Generation,
        reader: CheckpointReader,
        tool: Criu,
        at_hand: AtHand | None = None,
        ranks: Sequence[Rank] | None = None,
    ) -> None:
        """What is not `at_hand` is read from the store. The ranks are all of the generation, where none are named."""
        self._generation = generation
        self._ranks = tuple(generation.ranks if ranks is None else ranks)
        self._scratch = generation.layout.restored(generation.epoch)
        self._ahead = generation.layout.ahead(generation.epoch)
        self._reader = reader
        self._tool = tool
        self._at_hand = at_hand or AtHand()
        self._gate = _Gate(0)
        self._futures: list[Future[None]] = []
        self.timings: dict[str, float] = {}  # milliseconds, by phase
        self.origins: list[Literal["at_hand", "ahead", "read"]] = []  # of the parts of ranks

    def bring(self, *, deadline_s: float) -> dict[int, dict[str, Any]]:
        """Restores and loads. Returns counts per local rank: sequence -> `contributed`, `completed`, `members`.

        Raises:
            ErgoError: damaged checkpoint, missing file, an inconsistent cut, a deadline. Nothing runs; the caller
                kills the generation.
        """
        try:
            self.processes(lambda: _volume(self._generation, self._reader), deadline_s=deadline_s)
            clock = time.perf_counter()
            self._generation.attach()
            counts = load_all(self._generation, self.device_files, deadline_s)
            self._note("reconnect", clock)
            return counts
        except BaseException:
            self.refuse()
            raise
        finally:
            self.discard()

    def processes(self, volume: Callable[[], None], *, deadline_s: float) -> None:
        """Reads what is needed, and the job's directory by `volume`; restores the processes, which are paused then.

        Raises:
            ErgoError: as of `bring`; `refuse` and `discard` come next.
        """
        generation, clock = self._generation, time.perf_counter()
        generation.layout.scratch(self._scratch.name)
        self._require_whole()
        manifest = self._reader.manifest
        for rank in self._ranks:
            parts = manifest.ranks[rank.rank]
            if not parts.process and parts.exit_code is not None:
                rank.exit = RankExit(rank.rank, parts.exit_code)
            rank.last_step = manifest.header.ranks[rank.rank].step
        in_parallel([volume, *(lambda rank=rank: self._fetch(rank) for rank in self._ranks)])
        clock = self._note("read", clock)
        waiting = [r for r in self._ranks if r.exit is None and r.has_tree]
        for rank in self._ranks:
            if rank.exit is not None:  # others may need what it has contributed, or the store it has kept
                generation.ring_of_ended(rank, self.device_files(rank) / "ring")
        self._gate = gate = _Gate(len(waiting))
        self._futures = [
            in_background(_restore_rank, generation, rank, self._tool, self._scratch, gate, deadline_s)
            for rank in waiting
        ]
        gate.wait_all(deadline_s)
        self._note("processes", clock)

    def device_files(self, rank: Rank) -> Path:
        """Where the device part of a rank was read to."""
        return device_files(self._scratch, rank.rank)

    def discard(self) -> None:
        """Removes what was read, or brought ahead. Hundreds of megabytes: not while the job waits."""
        in_background(_remove, self._scratch, self._ahead)

    def go(self) -> None:
        """Lets the ranks run."""
        clock = time.perf_counter()
        self._generation.start()
        self.release()
        self._note("reconnect", clock)

    def release(self) -> None:
        """Lets the restored processes run."""
        self._gate.open()
        for future in self._futures:
            future.result()

    def refuse(self) -> None:
        """Ends the paused ranks. Idempotent; nothing after `go`."""
        self._gate.refuse()
        for future in self._futures:
            future.exception()  # each has ended its own rank

    def _require_whole(self) -> None:
        """Every rank that is to go on from it is in there; of a checkpoint of the whole job not all have ended."""
        manifest = self._reader.manifest
        pack = manifest.header.pack
        why = why_lost([manifest.ranks[rank.rank] for rank in self._ranks], pack)
        if why := why or ("" if why_lost(manifest.ranks, pack) else why_over(manifest.ranks, pack)):
            raise CheckpointError(
                f"Nothing goes on from checkpoint {manifest.root}: {why}.",
                code=DAMAGED,
                remedy="Restore an earlier one.",
            )

    def _fetch(self, rank: Rank) -> None:
        wanted = [(Part.device(rank.rank), self.device_files(rank))]
        if rank.exit is None and rank.has_tree:
            wanted.append((Part.process(rank.rank), process_files(self._scratch, rank.rank)))
        refs = self._reader.refs()
        for part, dest in wanted:
            if part in refs and self._at_hand.take(part, refs[part], dest):
                self.origins.append("at_hand")
                continue
            earlier = ahead.earlier(self._ahead, part)
            self._reader.restore_part(part, dest, earlier)
            self.origins.append("read" if earlier is None else "ahead")

    def _note(self, phase: str, since: float) -> float:
        now = time.perf_counter()
        self.timings[phase] = self.timings.get(phase, 0.0) + (now - since) * 1e3
        return now


def _remove(*directories: Path) -> None:
    for path in directories:
        shutil.rmtree(path, ignore_errors=True)


def _volume(generation: Generation, reader: CheckpointReader) -> None:
    reader.restore_part(Part.volume(), generation.layout.volume)
    generation.mount()


def load_all(generation: Generation, files: Callable[[Rank], Path], deadline_s: float) -> dict[int, dict[str, Any]]:
    """Gives the proxies the state that was dumped of every rank of a generation; `files` says where.

    Returns:
        Per local rank: sequence -> `contributed`, `completed`, `members`.

    Raises:
        ErgoError: as of `load`; or the ranks were not dumped at a consistent cut.
    """
    ranks = generation.ranks
    loaded = in_parallel([lambda rank=rank: load(generation, rank, files(rank), deadline_s) for rank in ranks])
    counts = {rank.rank: each for rank, each in zip(ranks, loaded, strict=True)}
    require_same_counts(counts)
    return counts


def load(generation: Generation, rank: Rank, device: Path, deadline_s: float) -> dict[str, Any]:
    """Gives a rank's proxy the state that was dumped to `device`; how far its collectives have come.

    Raises:
        ErgoError: the files cannot be used, a proxy that died, a deadline.
    """
    proxy = generation.proxy_of(rank)
    return proxy.load(rank.rank, device / "meta", device / "storages", deadline_s=deadline_s)["counts"]


def _restore_rank(
    generation: Generation, rank: Rank, tool: Criu, scratch: Path, gate: _Gate, deadline_s: float
) -> None:
    try:
        images, unread = process_files(scratch, rank.rank), device_files(scratch, rank.rank) / "ring"
        generation.restore_rank(rank, tool, images, unread, gate.paused, deadline_s)
    except BaseException as error:
        gate.failed(error)
        raise


class _Gate:
    """Ranks arrive paused and are let go, or refused, together."""

    def __init__(self, parties: int) -> None:
        self._parties = parties
        self._condition = threading.Condition()
        self._arrived = 0
        self._error: BaseException | None = None
        self._open: bool | None = None

    def paused(self) -> None:
        """Called by each rank's restorer; returns when it may run, raises when it must not."""
        with self._condition:
            self._arrived += 1
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._open is not None)
            if not self._open:
                raise RunError("the restore was called off.", code="run.called-off")

    def failed(self, error: BaseException) -> None:
        with self._condition:
            self._error = self._error or error
            self._condition.notify_all()

    def wait_all(self, deadline_s: float) -> None:
        with self._condition:
            done = self._condition.wait_for(lambda: self._error or self._arrived == self._parties, deadline_s)
            if self._error is not None:
                if isinstance(self._error, ErgoError):
                    raise self._error
                raise RunError(f"a rank could not be restored: {self._error}", code="run.restore") from self._error
            if not done:
                raise RunError(
                    f"only {self._arrived} of {self._parties} ranks were restored within {deadline_s:.0f} s.",
                    code="run.deadline",
                )

    def open(self) -> None:
        with self._condition:
            self._open = True
            self._condition.notify_all()

    def refuse(self) -> None:
        with self._condition:
            if self._open is None:
                self._open = False
            self._condition.notify_all()
