"""A job's processes on one node, and the operations on them: start, cut, restore, end.

The order of a cut is in docs/design/0001. Everything up to the end of the old generation can be called
off: the job then runs on as it was.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model.units import counted
from proxy_runtime.build import Build
from proxy_runtime.checkpoint.errors import BUSY, CheckpointError
from proxy_runtime.checkpoint.reader import CheckpointReader
from proxy_runtime.checkpoint.sketch import sketch_of
from proxy_runtime.checkpoint.store import Store
from proxy_runtime.cut.cutter import Cutter
from proxy_runtime.cut.dumped import AtHand, device_files, note_packed
from proxy_runtime.device.client import Zygote
from proxy_runtime.errors import ErgoError
from proxy_runtime.process.criu_setup import Criu
from proxy_runtime.shim.generation import Generation, ended_on_error
from proxy_runtime.shim.header import manifest_header, rank_states, restorable, sketch_in, sketched
from proxy_runtime.shim.layout import EpochLayout, RunLayout
from proxy_runtime.shim.placing import place
from proxy_runtime.shim.reattaching import Reattachment
from proxy_runtime.shim.restoring import Restoration
from proxy_runtime.shim.spec import CutReport, CutRequest, RankExit, RunError, RunSpec
from proxy_runtime.shim.zygotes import fork_proxies, start_zygote

TERMINATE_GRACE_S = 5.0
KEEP_CHECKPOINTS = 3
ENDING_S = 3.0


class NodeJob:
    """Owns one job's processes on this node.

    `start`, `restore`, `cut` and `end` are called from one thread; `poll` from another.
    """

    def __init__(self, spec: RunSpec, layout: RunLayout, build: Build, tool: Callable[[], Criu]) -> None:
        self.spec = spec
        self.layout = layout
        self.build = build
        self._tool = tool  # found when first needed: a job that is never cut needs no CRIU
        self._zygote: Zygote | None = None
        self._lock = threading.RLock()  # guards `current` against the monitor
        self.current: Generation | None = None
        self._store: Store | None = None
        self.exits: dict[int, RankExit] = {}
        self.epoch = 0

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Starts all ranks and proxies. Raises ErgoError with nothing left behind."""
        layout = self._new_epoch(0)
        self.layout.set_current(layout)  # from its first moment on, what the job writes is the job's
        generation = Generation.prepare(self.spec, 0, layout, self.build, self.spec.devices)
        with ended_on_error(generation):
            self._start_zygote()
            generation.mount()
            generation.launch_ranks()  # they import torch while the zygote does
            self._fork_proxies(generation)
            generation.connect()
            generation.attach()
            generation.start()
        self._adopt(generation)

    def restore(self, reader: CheckpointReader) -> None:
        """Continues a checkpoint here. Raises ErgoError with nothing left behind."""
        spec = self.spec
        restorable(reader, spec, self.build)
        self.epoch = reader.manifest.epoch + 1
        layout = self._new_epoch(self.epoch, volume=False)
        header = reader.manifest.header
        devices = list(dict.fromkeys(header.placement))
        before = [devices.index(device) for device in header.placement]
        generation = Generation.prepare(spec, self.epoch, layout, self.build, spec.devices)
        generation.placement = place(spec, header.ranks, spec.devices, before)
        with ended_on_error(generation):
            self._start_zygote()
            self._fork_proxies(generation)
            generation.connect()
            restoration = Restoration(generation, reader, self._tool())
            restoration.bring(deadline_s=120.0)
            restoration.go()
        self.exits = {exit.rank: exit for exit in (rank.exit for rank in generation.ranks) if exit is not None}
        self._adopt(generation)

    def end(self) -> None:
        """Ends everything. Idempotent."""
        with self._lock:
            generation, self.current = self.current, None
        if generation is not None:
            generation.kill()
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def fail(self) -> None:
        """A rank or proxy is gone: the others get SIGTERM, a few seconds, then SIGKILL."""
        with self._lock:
            generation = self.current
        if generation is not None:
            for rank in generation.ranks:
                if rank.ring is not None:
                    rank.ring.mark_proxy_gone()
            generation.terminate_ranks(TERMINATE_GRACE_S)
            generation.kill()

    # ------------------------------------------------------------------ what the monitor sees

    def poll(self) -> list[RankExit]:
        """Exits since the last call."""
        with self._lock:
            if self.current is None:
                return []
            self.current.poll_exits()
            exits = [rank.exit for rank in self.current.ended() if rank.exit is not None]
            fresh = [exit for exit in exits if exit.rank not in self.exits]
            self.exits.update({exit.rank: exit for exit in fresh})
        return fresh

    @property
    def finished(self) -> bool:
        return len(self.exits) == self.spec.processes

    def dead_proxy(self) -> int | None:
        with self._lock:
            return self.current.dead_proxy() if self.current is not None else None

    def status(self) -> dict[str, Any]:
        """Step per rank, epoch, width, processes and memory, for `ergo run` and tests."""
        with self._lock:
            generation = self.current
            if generation is None:
                return {"epoch": self.epoch, "alive": False}
            tree = self.spec.pack == "node"
            return {
                "epoch": generation.epoch,
                "alive": True,
                "width": generation.devices,
                "placement": sorted(set(generation.placement)) if tree else list(generation.placement),
                "step": generation.step(),
                "attached": all(rank.attached for rank in generation.ranks),
                "rank_pids": [
                    rank.container.rank_pid if rank.container else 0 for rank in generation.ranks[: self.spec.processes]
                ],
                "proxy_pids": [proxy.pid for proxy in generation.proxies.values()],
                "rss_bytes": generation.resident_bytes(),
            }

    # ------------------------------------------------------------------ the cut

    def cut(self, request: CutRequest) -> CutReport:
        """Takes a checkpoint, and moves or stops the job if asked.

        Never raises for a cut that failed: the report says `called-off` and why, and the job runs on.
        """
        report = CutReport(epoch=self.epoch)
        generation = self.current
        if generation is None or not generation.living():
            report.outcome = "job-ended"
            return report
        living = len(generation.living())
        try:
            self._cut(generation, request, report)
        except ErgoError as error:
            report.code, report.error = error.code, str(error)
        except Exception as error:  # the job must outlive any fault of ours
            report.code, report.error = "run.internal", f"{type(error).__name__}: {error}"
        if report.error and report.outcome == "called-off" and self._is_ending(generation, living):
            report.outcome, report.error, report.code = "job-ended", "", ""
        return report

    def _is_ending(self, generation: Generation, living: int) -> bool:
        """Whether a cut failed because the job's ranks were just leaving: then there was nothing to cut."""
        limit = time.monotonic() + ENDING_S
        while generation.living():
            generation.poll_exits()
            if len(generation.living()) == living or time.monotonic() > limit:
                return False
            time.sleep(0.01)
        return True

    def _cut(self, old: Generation, request: CutRequest, report: CutReport) -> None:
        clock = time.perf_counter
        devices = request.devices or old.devices
        if self.spec.pack == "node" and devices != old.devices:
            raise RunError(
                f"a job that starts its own ranks sees {counted(old.devices, 'device')} for life; it cannot be cut to "
                f"{devices}.",
                code="run.bad-width",
            )
        if not 1 <= devices <= self.spec.world_size:
            raise RunError(
                f"cannot place {counted(self.spec.world_size, 'rank')} on {counted(devices, 'device')}.",
                code="run.bad-width",
            )
        if request.keep_processes:
            self._reattach(old, devices, request, report)
            return
        store = self._opened_store()
        scratch = old.layout.scratch("cut")
        fresh: Generation | None = None
        tool = self._tool()
        moving = request.move and not request.stop
        if moving:  # warm targets before the clock of the downtime starts
            layout = self._new_epoch(self.epoch + 1, volume=False)
            fresh = Generation.prepare(self.spec, self.epoch + 1, layout, self.build, devices)
        released = False
        try:
            if fresh is not None:
                self._fork_proxies(fresh)
                if devices == old.devices:
                    fresh.placement = old.placement
                    fresh.connect()
            cutter = Cutter(old, tool, scratch, report)
            start = clock()
            limit_s = request.deadline_s
            with store.begin(self.spec.job_id, self.epoch) as writer:
                cutter.stop(at_step=request.at_step, step_deadline_s=request.step_deadline_s, deadline_s=limit_s)
                cutter.finish(cutter.targets(), deadline_s=limit_s)
                cutter.dump(writer, hold=request.move or request.stop, deadline_s=limit_s)
                if not request.move and not request.stop:
                    old.release()
                    released = True
                    report.ms["downtime"] = (clock() - start) * 1e3 - report.ms.get("wait_for_step", 0.0)
                committed = clock()
                cutter.pack(writer)
                ranks = sketched(rank_states(old, cutter.counts), sketch_in(writer))
                if fresh is not None and devices != old.devices:  # who shares a device is not known before
                    fresh.placement = place(self.spec, ranks, devices, old.placement)
                    fresh.connect()
                # Dumped only if all ranks lived or had exited with 0, so that the job can go on from it.
                checkpoint = writer.commit(manifest_header(old, ranks), cutter.exits)
            report.checkpoint = str(checkpoint)
            report.ms["write"] = (clock() - committed) * 1e3
            if fresh is not None:
                restored = clock()
                reader = store.read(checkpoint, self.spec.job_id)
                note_packed(scratch, reader.refs())
                restoration = Restoration(fresh, reader, tool, AtHand([scratch]))
                restoration.bring(deadline_s=limit_s)
                try:
                    self._swap(fresh)
                    restoration.go()
                except BaseException:
                    restoration.refuse()
                    raise
                report.ms |= restoration.timings
                report.ms["restore"] = (clock() - restored) * 1e3
                report.ms["downtime"] = (clock() - start) * 1e3 - report.ms.get("wait_for_step", 0.0)
                report.outcome, report.devices = "moved", devices
                released = True
                old.kill()
                self._discard(old)
            elif request.stop:
                self._adopt(None)
                old.kill()
                released = True
                report.outcome = "stopped"
            else:
                report.outcome = "checkpointed"
        except BaseException:
            self.epoch = old.epoch
            self._adopt(old)
            if fresh is not None:
                fresh.kill()
                self._discard(fresh)
            raise
        finally:
            if not released:
                old.release()
            shutil.rmtree(scratch, ignore_errors=True)
        report.epoch = self.epoch
        self._collect(store)

    def _reattach(self, old: Generation, devices: int, request: CutRequest, report: CutReport) -> None:
        """The same for a job whose processes stay; old and fresh generation have one directory."""
        if request.stop or not request.move or devices == old.devices:
            raise RunError(
                f"processes are kept where a job goes on at another width; this one is on "
                f"{counted(old.devices, 'device')} already.",
                code="run.bad-width",
            )
        scratch = old.layout.scratch("cut")
        try:
            self._reattach_by(scratch, old, devices, request, report)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _reattach_by(
        self, scratch: Path, old: Generation, devices: int, request: CutRequest, report: CutReport
    ) -> None:
        clock = time.perf_counter
        fresh = Generation.prepare(self.spec, self.epoch + 1, old.layout, self.build, devices)
        reattachment = Reattachment(old, fresh)
        try:
            self._fork_proxies(fresh)
            cutter = Cutter(old, None, scratch, report)
            start = clock()
            limit_s = request.deadline_s
            cutter.stop(at_step=request.at_step, step_deadline_s=request.step_deadline_s, deadline_s=limit_s)
            cutter.finish(cutter.targets(), deadline_s=limit_s)
            cutter.dump_devices(deadline_s=limit_s)
            connected = clock()
            ranks = sketched(
                rank_states(old, cutter.counts), lambda rank: sketch_of(device_files(scratch, rank) / "storages")
            )
            fresh.placement = place(self.spec, ranks, devices, old.placement)
            fresh.connect()
            report.ms["connect"] = (clock() - connected) * 1e3
            reattachment.adopt()
            reattachment.bring(lambda rank: device_files(scratch, rank.rank), deadline_s=limit_s)
        except BaseException:
            reattachment.refuse()
            old.release()
            raise
        self._swap(fresh)  # from here on there is no way back: a proxy that dies ends the job, as at any time
        reattachment.take()
        report.outcome, report.epoch, report.devices = "moved", self.epoch, devices
        reattachment.go()
        report.ms |= reattachment.timings
        report.ms["downtime"] = (clock() - start) * 1e3 - report.ms.get("wait_for_step", 0.0)

    def _swap(self, fresh: Generation) -> None:
        """The commit point of a move: the fresh generation stands, and is the job from here on.

        The old one is held and ends after the new one runs; the monitor looks at it no more.
        """
        self.epoch = fresh.epoch
        self._adopt(fresh)

    # ------------------------------------------------------------------ helpers

    def _opened_store(self) -> Store:
        if self._store is None:
            self._store = Store.open(Path(self.spec.checkpoint_dir))
        return self._store

    def _collect(self, store: Store) -> None:
        """Keeps the last checkpoints only; a store in use by somebody else is left for the next time."""
        try:
            store.gc(last=KEEP_CHECKPOINTS, deadline_s=0.0)
        except CheckpointError as error:
            if error.code != BUSY:
                raise

    def _adopt(self, generation: Generation | None) -> None:
        with self._lock:
            self.current = generation
            if generation is not None:
                self.layout.set_current(generation.layout)

    def _new_epoch(self, epoch: int, *, volume: bool = True) -> EpochLayout:
        layout = self.layout.epoch(epoch)
        shutil.rmtree(layout.root, ignore_errors=True)
        return layout.create(volume=volume)

    def _discard(self, generation: Generation) -> None:
        shutil.rmtree(generation.layout.root, ignore_errors=True)

    def _start_zygote(self) -> None:
        self._zygote = start_zygote(self.spec, self.build, self.layout)

    def _fork_proxies(self, generation: Generation) -> None:
        if self._zygote is None:
            raise RunError("the zygote of the device proxies is not running.", code="run.no-zygote")
        fork_proxies(generation, self._zygote, self.layout)
