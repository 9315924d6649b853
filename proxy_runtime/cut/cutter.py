"""Taking a cut of a generation: stop, agree, finish, freeze, dump.

After `Cutter.take` every rank is held (stopped), every proxy stands at the agreed cut, and all state lies
in the scratch directory except the volume, which is in the checkpoint writer already. `Generation.release`
undoes everything at any moment before the old processes are ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.ids import CheckpointId
from model.manifest import ManifestHeader
from proxy_runtime.checkpoint.parts import Part
from proxy_runtime.checkpoint.writer import CheckpointWriter
from proxy_runtime.cut.agreement import targets, verify_completed
from proxy_runtime.process import criu
from proxy_runtime.process.criu_setup import Criu
from proxy_runtime.shim.generation import Generation, Rank, in_parallel
from proxy_runtime.shim.spec import CutReport, CutRequest, RunError


def elapsed_ms(since: float) -> float:
    """Milliseconds since a reading of `time.perf_counter`."""
    return (time.perf_counter() - since) * 1e3


@dataclass(slots=True)
class Frozen:
    """A consistent cut on disk, not yet committed."""

    writer: CheckpointWriter
    scratch: Path
    ranks: list[Rank]
    counts: dict[int, dict[str, Any]]  # per rank, as its proxy reported them

    def write(self, header: ManifestHeader) -> CheckpointId:
        """Packs everything and commits the manifest; the writer is aborted when that fails."""
        try:
            for rank in self.ranks:
                base = self.scratch / f"rank-{rank.rank}"
                self.writer.add_file(Part.device(rank.rank), "meta", base / "meta")
                self.writer.add_file(Part.device(rank.rank), "storages", base / "storages")
                if (base / "process").is_dir():
                    self.writer.add_tree(Part.process(rank.rank), base / "process")
            return self.writer.commit(header)
        except BaseException:
            self.writer.abort()
            raise


class Cutter:
    """One cut of one generation. Every wait has a deadline; every failure raises ErgoError."""

    def __init__(
        self, generation: Generation, tool: Criu, scratch: Path, request: CutRequest, report: CutReport
    ) -> None:
        self._generation = generation
        self._tool = tool
        self._scratch = scratch
        self._request = request
        self._report = report
        self._counts: dict[int, dict[str, Any]] = {}

    def take(self, writer: CheckpointWriter) -> Frozen:
        """Raises ErgoError; the caller then releases the generation."""
        try:
            self._await_ranks()
            self._counts = self._stop()
            self._finish()
            self._require_clean_processes()
            self._dump(writer)
        except BaseException:
            writer.abort()
            raise
        generation = self._generation
        return Frozen(writer, self._scratch, generation.ranks, self._counts)

    def _await_ranks(self) -> None:
        """Until every rank has taken its channel: for its first tenths of a second it still holds the descriptor."""
        limit = time.monotonic() + self._request.deadline_s
        while not all(rank.attached for rank in self._generation.ranks):
            self._generation.poll_exits()
            if time.monotonic() > limit:
                raise RunError("not every rank has started in time.", code="cut.deadline")
            time.sleep(0.002)

    def _stop(self) -> dict[int, dict[str, Any]]:
        start = time.perf_counter()
        request, proxies = self._request, self._generation.proxies
        if request.at_step is not None:
            # A preference: when not every rank gets there in time, wherever they are is taken.
            replies = in_parallel(
                [
                    lambda proxy=proxy: proxy.stop(at_step=request.at_step, deadline_s=request.step_deadline_s)
                    for proxy in proxies
                ]
            )
            self._report.reached_step = all(reply["reached"] for reply in replies)
            self._report.ms["wait_for_step"] = elapsed_ms(start)
            start = time.perf_counter()
        replies = in_parallel([lambda proxy=proxy: proxy.stop(deadline_s=request.deadline_s) for proxy in proxies])
        self._report.ms["stop"] = elapsed_ms(start)
        counts: dict[int, dict[str, Any]] = {}
        for reply in replies:
            counts.update({int(rank): value for rank, value in reply["ranks"].items()})
        self._report.steps = [
            counts[rank]["step"] if rank in counts else 0 for rank in range(len(self._generation.ranks))
        ]
        return counts

    def _finish(self) -> None:
        start = time.perf_counter()
        goal = targets(counts["comms"] for counts in self._counts.values())
        replies = in_parallel(
            [
                lambda proxy=proxy: proxy.finish(goal, deadline_s=self._request.deadline_s)
                for proxy in self._generation.proxies
            ]
        )
        self._report.ms["agree"] = elapsed_ms(start)
        verify_completed(reply["completed"] for reply in replies)
        for reply in replies:
            for sequence, ranks in reply["completed"].items():
                for rank, count in ranks.items():
                    self._counts[int(rank)]["comms"][sequence]["completed"] = count
        self._report.pending_operations = sum(reply["pending_operations"] for reply in replies)
        self._report.pending_bytes = sum(reply["pending_bytes"] for reply in replies)

    def _require_clean_processes(self) -> None:
        start = time.perf_counter()
        found = self._generation.violations()
        self._report.ms["inspect"] = elapsed_ms(start)
        if found:
            raise RunError(
                f"the job cannot be cut now: {'; '.join(found)}.",
                code="cut.unsupported-resource",
                remedy="Close it in the script; the job runs on.",
            )

    def _dump(self, writer: CheckpointWriter) -> None:
        start = time.perf_counter()
        generation = self._generation
        living = generation.living()
        capture = _FrozenTogether(len(living), self._request.deadline_s, lambda: self._capture(writer))

        def device(rank: Rank) -> int:
            base = self._scratch / f"rank-{rank.rank}"
            base.mkdir(mode=0o700, exist_ok=True)
            size = generation.proxy_of(rank).dump(rank.rank, base / "meta", base / "storages")
            self._report.ms["device"] = max(self._report.ms.get("device", 0.0), elapsed_ms(start))
            return size

        def process(rank: Rank) -> int:
            images = self._scratch / f"rank-{rank.rank}" / "process"
            images.mkdir(mode=0o700, parents=True, exist_ok=True)
            assert rank.container is not None
            try:
                done = criu.dump(
                    self._tool, rank.container, images, on_frozen=capture.wait, deadline_s=self._request.deadline_s
                )
            except BaseException:
                capture.abort()  # the others must not wait for one that never comes
                raise
            return done.bytes

        calls: list[Callable[[], int]] = [lambda rank=rank: process(rank) for rank in living]
        calls += [lambda rank=rank: device(rank) for rank in generation.ranks]
        sizes = in_parallel(calls)
        self._report.ms["process"] = elapsed_ms(start)
        self._report.image_bytes, self._report.device_bytes = sum(sizes[: len(living)]), sum(sizes[len(living) :])

    def _capture(self, writer: CheckpointWriter) -> None:
        """Runs once, while every rank of the job is frozen: nobody can write to the volume."""
        start = time.perf_counter()
        if self._request.move or self._request.stop:
            self._generation.hold()
        writer.add_tree(Part.volume(), self._generation.layout.volume)
        self._report.ms["volume"] = elapsed_ms(start)


class _FrozenTogether:
    """Lets one action run while all participants are frozen, then lets all of them go on."""

    def __init__(self, parties: int, deadline_s: float, action: Callable[[], None]) -> None:
        self._deadline_s = deadline_s
        self._barrier = threading.Barrier(max(parties, 1), action=action)

    def wait(self) -> None:
        try:
            self._barrier.wait(self._deadline_s)
        except threading.BrokenBarrierError as error:
            raise RunError("another rank could not be frozen.", code="cut.not-frozen") from error

    def abort(self) -> None:
        self._barrier.abort()
