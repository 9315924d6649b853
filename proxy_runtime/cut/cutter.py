"""The phases of a cut of a generation: stop, agree, finish, freeze and dump, pack.

A job that is on one node goes through them in one call; of a job on several nodes each shim does a phase when the
control plane says so, which agrees on the targets in between. After `Cutter.dump` with `hold` every local rank is
held (stopped), every proxy stands at the agreed cut, and all state lies in the scratch directory except the volume,
which is in the checkpoint writer already. `Generation.release` undoes everything at any moment before the old
processes are ended.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from model.manifest import PartRef
from proxy_runtime.channel.ring import Ring, RingError
from proxy_runtime.checkpoint.parts import Part
from proxy_runtime.checkpoint.writer import CheckpointWriter
from proxy_runtime.cut.agreement import targets, verify_completed
from proxy_runtime.cut.dumped import device_files, note_packed, process_files
from proxy_runtime.cut.living import require_living
from proxy_runtime.process import criu
from proxy_runtime.process.criu_setup import Criu
from proxy_runtime.shim.generation import Generation, Rank
from proxy_runtime.shim.spec import CutReport, RunError
from proxy_runtime.shim.workers import in_parallel

_NOT_FROZEN = "cut.not-frozen"

LOOK_S = 1.0
"""While the end of a step is waited for: how often is looked whether it can still come."""


def elapsed_ms(since: float) -> float:
    """Milliseconds since a reading of `time.perf_counter`."""
    return (time.perf_counter() - since) * 1e3


class Cutter:
    """One cut of one generation. Every wait has a deadline; every failure raises ErgoError.

    Attributes:
        counts: per local rank what its proxy has reported: `step`, `comms` (sequence -> `contributed`, `completed`,
            `members`); as of `stop`, then of `finish`; `memory` as of `stop`.
        exits: exit codes of the ranks that have no process any more, as of `dump`: each is 0.
        scratch: the directory of its files.
    """

    def __init__(self, generation: Generation, tool: Criu | None, scratch: Path, report: CutReport) -> None:
        """`report` is filled in; `scratch` becomes this cut's own; without a `tool` only devices are dumped."""
        self._generation = generation
        self._tool = tool
        self.scratch = scratch
        self._report = report
        self.counts: dict[int, dict[str, Any]] = {}
        self.exits: dict[int, int] = {}
        self._only: Collection[int] | None = None

    # ------------------------------------------------------------------ phases

    def stop(
        self,
        *,
        at_step: int | None,
        step_deadline_s: float,
        deadline_s: float,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Holds every queue at a message boundary and counts.

        Args:
            at_step: a preference: when not every rank gets there in time, wherever they are is taken.
            step_deadline_s: how long it is waited for.
            deadline_s: for the rest.
            given_up: whether nobody wants this cut any more; the wait for a step ends then.

        Raises:
            ErgoError: also where a rank has died, before or meanwhile (``run.lost``), or the cut was given up.
        """
        self._await_ranks(deadline_s)
        require_living(self._generation)
        start = time.perf_counter()
        proxies = list(self._generation.proxies.values())
        if at_step is not None:
            self._report.reached_step = self._await_step(at_step, start + step_deadline_s, given_up)
            self._report.ms["wait_for_step"] = elapsed_ms(start)
            start = time.perf_counter()
        replies = in_parallel([lambda proxy=proxy: proxy.stop(deadline_s=deadline_s) for proxy in proxies])
        self._report.ms["stop"] = elapsed_ms(start)
        self.counts = {}
        for reply in replies:
            self.counts.update({int(rank): value for rank, value in reply["ranks"].items()})
        for reply in in_parallel([lambda proxy=proxy: proxy.stats(deadline_s=deadline_s) for proxy in proxies]):
            for rank, memory in reply["ranks"].items():
                self.counts.setdefault(int(rank), {})["memory"] = memory
            for name, count in reply.get("splice", {}).items():
                if isinstance(count, int):
                    self._report.sharing[name] = self._report.sharing.get(name, 0) + count
        ranks = self._generation.ranks
        self._report.steps = [self.counts.get(rank.rank, {}).get("step", 0) for rank in ranks]
        require_living(self._generation)

    def targets(self) -> dict[str, int]:
        """What a job agrees on whose ranks are all here."""
        return targets(counts["comms"] for counts in self.counts.values())

    def finish(self, goal: Mapping[str, int], *, deadline_s: float) -> None:
        """Completes every collective up to the goal, and store requests that are under way."""
        require_living(self._generation)
        start = time.perf_counter()
        proxies = self._generation.proxies.values()
        replies = in_parallel([lambda proxy=proxy: proxy.finish(goal, deadline_s=deadline_s) for proxy in proxies])
        self._report.ms["agree"] = elapsed_ms(start)
        verify_completed(reply["completed"] for reply in replies)
        for reply in replies:
            for sequence, ranks in reply["completed"].items():
                for rank, count in ranks.items():
                    comms = self.counts[int(rank)]["comms"]
                    if sequence in comms:
                        comms[sequence]["completed"] = count
        self._report.pending_operations = sum(reply["pending_operations"] for reply in replies)
        self._report.pending_bytes = sum(reply["pending_bytes"] for reply in replies)

    def dump(
        self, writer: CheckpointWriter, *, hold: bool, deadline_s: float, only: Collection[int] | None = None
    ) -> None:
        """Dumps devices and processes into the scratch directory and the volume, all frozen together, into `writer`.

        Args:
            writer: takes the volume now, and the rest with `pack`. It stays the caller's: abort it after an error.
            hold: keep the ranks stopped afterwards.
            deadline_s: for all of it.
            only: ranks whose processes are dumped, and packed; the others are stopped and stay. None for all.
        """
        generation = self._generation
        self._only = only
        require_living(generation)
        self._require_clean_processes()
        start = time.perf_counter()
        living = [rank for rank in generation.living() if self._meant(rank)]
        # Whoever is not dumped has ended well: who dies from now on fails its own dump.
        require_living(generation)
        gone = [rank for rank in generation.ranks if rank.has_tree and rank.exit is not None]
        self.exits = {rank.rank: rank.exit.code for rank in gone if rank.exit is not None}
        capture = FrozenTogether(len(living), deadline_s, lambda: self._capture(writer, hold, deadline_s))

        def process(rank: Rank) -> int:
            images = process_files(self.scratch, rank.rank)
            images.mkdir(mode=0o700, parents=True, exist_ok=True)
            assert rank.container is not None
            assert self._tool is not None
            try:
                done = criu.dump(self._tool, rank.container, images, on_frozen=capture.wait, deadline_s=deadline_s)
            except BaseException as error:
                capture.abort(error)  # the others must not wait for one that never comes
                raise
            return done.bytes

        calls: list[Callable[[], int]] = [lambda rank=rank: process(rank) for rank in living]
        calls += self._device_dumps(start, deadline_s)
        try:
            sizes = in_parallel(calls)
        except Exception as error:
            raise capture.cause or error from None
        if not living:  # all have ended: nobody is left who could write to the volume
            capture.wait()
        require_living(generation)  # of a tree the image may be without a process that was killed
        self._report.ms["process"] = elapsed_ms(start)
        self._report.image_bytes, self._report.device_bytes = sum(sizes[: len(living)]), sum(sizes[len(living) :])

    def dump_devices(self, *, deadline_s: float) -> None:
        """Dumps what the devices hold of each rank into the scratch directory, and nothing else. The ranks run on."""
        require_living(self._generation)
        self._report.device_bytes = sum(in_parallel(self._device_dumps(time.perf_counter(), deadline_s)))
        require_living(self._generation)

    def pack(self, writer: CheckpointWriter) -> None:
        """Hands what was dumped to the writer. The ranks may run meanwhile."""
        for rank in filter(self._meant, self._generation.ranks):
            base = device_files(self.scratch, rank.rank)
            writer.add_file(Part.device(rank.rank), "meta", base / "meta")
            writer.add_file(Part.device(rank.rank), "storages", base / "storages")
            if (base / "ring").exists():
                writer.add_file(Part.device(rank.rank), "ring", base / "ring")
            if (images := process_files(self.scratch, rank.rank)).is_dir():
                writer.add_tree(Part.process(rank.rank), images)

    def keep(self, refs: Mapping[Part, PartRef]) -> None:
        """The scratch directory may be restored from: a store has all of it, as `refs`."""
        note_packed(self.scratch, refs)

    def discard(self) -> None:
        """Removes the scratch directory."""
        shutil.rmtree(self.scratch, ignore_errors=True)

    # ------------------------------------------------------------------ what they consist of

    def _device_dumps(self, start: float, deadline_s: float) -> list[Callable[[], int]]:
        def device(rank: Rank) -> int:
            base = device_files(self.scratch, rank.rank)
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            proxy = self._generation.proxy_of(rank)
            size = proxy.dump(rank.rank, base / "meta", base / "storages", deadline_s=deadline_s)
            self._report.ms["device"] = max(self._report.ms.get("device", 0.0), elapsed_ms(start))
            return size

        return [partial(device, rank) for rank in self._generation.ranks]

    def _await_step(self, at_step: int, until: float, given_up: Callable[[], bool]) -> bool:
        """Whether every proxy stands at the end of that step; those that do are not asked again."""
        waited_for = list(self._generation.proxies.values())
        while waited_for:
            left = max(0.0, min(LOOK_S, until - time.perf_counter()))
            calls = [partial(proxy.stop, at_step=at_step, deadline_s=left) for proxy in waited_for]
            replies = in_parallel(calls)
            waited_for = [proxy for proxy, reply in zip(waited_for, replies, strict=True) if not reply["reached"]]
            require_living(self._generation)
            if given_up():
                raise RunError("the cut was called off while the end of a step was waited for.", code="cut.deadline")
            if time.perf_counter() >= until:
                break
        return not waited_for

    def _await_ranks(self, deadline_s: float) -> None:
        """Until every rank has taken its channel: for its first tenths of a second it still holds the descriptor."""
        limit = time.monotonic() + deadline_s
        while not all(rank.attached for rank in self._generation.ranks):
            self._generation.poll_exits()
            if time.monotonic() > limit:
                raise RunError("not every rank has started in time.", code="cut.deadline")
            time.sleep(0.002)

    def _require_clean_processes(self) -> None:
        start = time.perf_counter()
        found = self._generation.violations(filter(self._meant, self._generation.living()))
        self._report.ms["inspect"] = elapsed_ms(start)
        if found:
            raise RunError(
                f"the job cannot be cut now: {'; '.join(found)}.",
                code="cut.unsupported-resource",
                remedy="Close it in the script; the job runs on.",
            )

    def _meant(self, rank: Rank) -> bool:
        return self._only is None or rank.rank in self._only

    def _capture(self, writer: CheckpointWriter, hold: bool, deadline_s: float) -> None:
        """Runs once, while every local rank is frozen: nobody can write to the volume."""
        start = time.perf_counter()
        if hold:
            self._generation.hold()
            self._generation.await_held([r for r in self._generation.living() if not self._meant(r)], deadline_s)
        for rank in self._generation.ranks:
            self._save_ring(rank)
        writer.add_tree(Part.volume(), self._generation.layout.volume)
        self._report.ms["volume"] = elapsed_ms(start)

    def _save_ring(self, rank: Rank) -> None:
        """Of a rank that has ended, or unmapped its ring on its way out: what is in there is in no process image."""
        if rank.ring is None or rank.shared:  # shared ones are in the image of the tree
            return
        if rank.alive and rank.container is not None:
            with suppress(RingError):
                Ring.of_process(rank.container.rank_pid).close()
                return
        base = device_files(self.scratch, rank.rank)
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        (base / "ring").write_bytes(rank.ring.unread())


class FrozenTogether:
    """Lets one action run while all participants are frozen, then lets all of them go on.

    Attributes:
        cause: why the first of them could not be frozen; those that waited for it say only that another one could not.
    """

    def __init__(self, parties: int, deadline_s: float, action: Callable[[], None]) -> None:
        self.cause: Exception | None = None
        self._deadline_s = deadline_s
        self._barrier = threading.Barrier(max(parties, 1), action=action)

    def wait(self) -> None:
        """Until all stand and the action has run.

        Raises:
            RunError: ``cut.not-frozen``: another one does not come.
        """
        try:
            self._barrier.wait(self._deadline_s)
        except threading.BrokenBarrierError as error:
            raise RunError("another rank could not be frozen.", code=_NOT_FROZEN) from error

    def abort(self, error: BaseException) -> None:
        """One does not come, and why."""
        if self.cause is None and isinstance(error, Exception) and getattr(error, "code", "") != _NOT_FROZEN:
            self.cause = error
        self._barrier.abort()
