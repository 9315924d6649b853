"""A generation from a checkpoint: volume, processes (paused), device state, then run."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proxy_runtime.checkpoint.parts import Part
from proxy_runtime.checkpoint.reader import CheckpointReader
from proxy_runtime.errors import ErgoError
from proxy_runtime.process.criu_setup import Criu
from proxy_runtime.shim.generation import Generation, Rank, in_background, in_parallel, require_same_counts
from proxy_runtime.shim.spec import RankExit, RunError


def restore(
    generation: Generation,
    reader: CheckpointReader,
    tool: Criu,
    *,
    deadline_s: float,
    commit: Callable[[], None],
    timings: dict[str, float] | None = None,
) -> None:
    """Fills a prepared generation, whose proxies are forked, from a checkpoint and sets it going.

    Every rank is restored and paused and every proxy loaded before `commit` is called; the ranks run only
    after it. An error before that raises with the ranks still paused; the caller kills the generation.

    Raises:
        ErgoError: damaged checkpoint, missing file, an inconsistent cut, a deadline.
    """
    timings = {} if timings is None else timings
    clock = time.perf_counter()
    scratch = generation.layout.scratch("restore")
    try:
        for rank in generation.ranks:
            # Only a rank that had ended well has no processes: any other end is the end of the job.
            rank.exit = None if reader.manifest.ranks[rank.rank].process else RankExit(rank.rank, 0)
        in_parallel(
            [
                lambda: _volume(generation, reader),
                *(lambda rank=rank: _fetch(rank, reader, scratch) for rank in generation.ranks),
            ]
        )
        timings["read"] = (time.perf_counter() - clock) * 1e3
        clock = time.perf_counter()

        waiting = [rank for rank in generation.ranks if rank.exit is None]
        gate = _Gate(len(waiting))
        futures = [in_background(_restore_rank, generation, rank, tool, scratch, gate, deadline_s) for rank in waiting]
        try:
            gate.wait_all(deadline_s)
            timings["processes"] = (time.perf_counter() - clock) * 1e3
            clock = time.perf_counter()
            generation.attach()
            loads = [lambda rank=rank: _load(generation, rank, scratch) for rank in waiting]
            require_same_counts(dict(zip((rank.rank for rank in waiting), in_parallel(loads), strict=True)))
            commit()
        except BaseException:
            gate.refuse()
            for future in futures:
                future.exception()  # each has ended its own rank
            raise
        gate.open()
        generation.start()
        for future in futures:
            future.result()
        timings["reconnect"] = (time.perf_counter() - clock) * 1e3
    finally:
        # Hundreds of megabytes: not while the job waits.
        in_background(lambda: shutil.rmtree(scratch, ignore_errors=True))


def _volume(generation: Generation, reader: CheckpointReader) -> None:
    reader.restore_part(Part.volume(), generation.layout.volume)
    generation.mount()


def _fetch(rank: Rank, reader: CheckpointReader, scratch: Path) -> None:
    base = scratch / f"rank-{rank.rank}"
    reader.restore_part(Part.device(rank.rank), base / "device")
    if rank.exit is None:
        reader.restore_part(Part.process(rank.rank), base / "process")


def _load(generation: Generation, rank: Rank, scratch: Path) -> dict[str, Any]:
    base = scratch / f"rank-{rank.rank}" / "device"
    return generation.proxy_of(rank).load(rank.rank, base / "meta", base / "storages")["counts"]


def _restore_rank(
    generation: Generation, rank: Rank, tool: Criu, scratch: Path, gate: _Gate, deadline_s: float
) -> None:
    try:
        images = scratch / f"rank-{rank.rank}" / "process"
        generation.restore_rank(rank, tool, images, gate.paused, deadline_s)
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
            self._open = False
            self._condition.notify_all()
