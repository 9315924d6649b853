"""A node's runtime: the six calls of `model.runtime`, over the shims of this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from model.ids import Epoch, JobId, NodeId, Step
from model.manifest import NumericsClass
from model.records import JobOnNode, NodeDevice
from model.runtime import (
    AttendInput,
    AttendResult,
    BarrierInput,
    BarrierResult,
    CheckpointInput,
    CheckpointResult,
    Outcome,
    Progress,
    RestoreInput,
    RestoreResult,
    StopInput,
    StopResult,
    TransferInput,
    TransferResult,
)
from proxy_runtime.errors import ErgoError
from proxy_runtime.node.clock import Clock
from proxy_runtime.node.commit import Committer
from proxy_runtime.node.errors import fenced, translated, unknown
from proxy_runtime.node.joining import Joined
from proxy_runtime.node.launch import NodeProfile
from proxy_runtime.node.ledger import Ledger
from proxy_runtime.node.parts import Part, Parts
from proxy_runtime.node.starting import Starter
from proxy_runtime.node.storage import Storage
from proxy_runtime.node.volumes import BaseVolumes
from proxy_runtime.shim.part_client import PartClient
from proxy_runtime.storage.fleet import FleetStore

_log = structlog.stdlib.get_logger(__name__)


_NOTHING = Progress(Step(0), 0)


class LocalNodeRuntime:
    """Implements `model.runtime.NodeRuntime` with the processes of this machine.

    An agent that starts again on the same directory finds its parts: everything that matters is on disk or in shims.

    Args:
        node: this node, with its incarnation.
        directory: the node's: shims, chunk store, base volumes, ledger. No other process uses it.
        fleet: the fleet's store.
        host: address at which other nodes reach the device proxies of this one.
        devices: the node's accelerators.
        device_kind: torch device type that proxies execute on.
        threads: threads a device.
        python: interpreter that ``python`` in a job's command stands for.
        free_bytes: with fewer on the disk no checkpoint is begun.
    """

    def __init__(
        self,
        node: NodeId,
        directory: Path,
        fleet: FleetStore,
        *,
        host: str,
        devices: tuple[NodeDevice, ...],
        device_kind: str = "cpu",
        threads: int = 1,
        python: str = sys.executable,
        free_bytes: int = 0,
    ) -> None:
        self.node = node
        self.directory = directory
        self._fleet = fleet
        self._free_bytes = free_bytes
        self.storage = Storage(fleet, directory / "store")
        names = tuple("/".join(device.id.path) for device in devices)
        self._memory = {device.id: device.memory_bytes for device in devices}
        profile = NodeProfile(node, names, device_kind, threads, directory / "store", host)
        self._volumes = BaseVolumes(directory, self.storage.materialize)
        self._ledger = Ledger(directory)
        self.parts = Parts(directory / "runs", self._ledger)
        self._starter = Starter(profile, fleet, self.storage, self._volumes, self._ledger, self.parts, python)
        self._calls = Joined()

    # ------------------------------------------------------------------ the six calls

    def attend(self, request: AttendInput, report: Callable[[Progress], None]) -> AttendResult:
        """Runs the node's part of a job until it ends; see `model.runtime.AttendInput`.

        Whatever `report` raises lets go of the part, whose ranks run on.
        """
        job, epoch = request.job, request.epoch
        with translated():
            part = self.parts.get(job, epoch)
            if self._ledger.epochs(job).over(epoch) and (part is None or part.ended):
                return AttendResult(Outcome.STOPPED, part.progress if part else _NOTHING)
            if part is None or not part.record.started:
                self._admit(job, epoch)
                if request.start == "restored":
                    raise unknown(job, epoch, self.node)
                try:
                    part = self._calls.run(("start", job, epoch), lambda: self._starter.start(request))
                except ErgoError:
                    if self._ledger.epochs(job).over(epoch):
                        return AttendResult(Outcome.STOPPED, _NOTHING)
                    raise
            elif request.start == "restored" and part.client.alive and not part.go():
                return AttendResult(Outcome.LOST, part.progress)
            return part.follow(report)

    def barrier(self, request: BarrierInput) -> BarrierResult:
        """Stops at a cut, finishes it, or resumes."""
        with translated():
            part = self._part(request.job, request.epoch)
            client, cut, limit = part.client, request.cut, request.deadline_s
            if request.phase == "stop":
                self.storage.make_room(self._here(), self._free_bytes)
                at, prefer = request.at_step, request.prefer_step_s
                return client.stop_queues(cut, at_step=at, prefer_step_s=prefer, deadline_s=limit)
            if request.phase == "finish":
                return client.finish(cut, request.targets, deadline_s=limit)
            client.resume(cut, deadline_s=limit)
            return BarrierResult(reached=True, ranks=())

    def checkpoint(self, request: CheckpointInput) -> CheckpointResult:
        """Writes the node's parts of a checkpoint into its store and the fleet's, or commits one."""
        kind = "write" if request.commit is None else "commit"
        key = (kind, request.job, request.epoch, request.cut, request.kind)
        with translated():
            part = self._part(request.job, request.epoch)
            call = self._write if request.commit is None else self._commit
            return self._calls.run(key, lambda: call(part, request))

    def transfer(self, request: TransferInput) -> TransferResult:
        """Fetches and verifies missing chunks; goes on where an earlier call left off."""
        key = ("transfer", request.job, request.epoch, request.checkpoint, request.ranks)
        with translated():
            self._require_current(request.job, request.epoch)
            result = TransferResult(0, 0)
            if not request.keeps or request.ranks:
                result = self._calls.run(key, lambda: self.storage.pull(request), remember=False)
            if request.spec is not None and request.placement is not None:
                spec, placement = request.spec, request.placement
                ready = ("ready", request.job, request.epoch)
                self._calls.run(ready, lambda: self._starter.make_ready(request, spec, placement))
            return result

    def restore(self, request: RestoreInput) -> RestoreResult:
        """Restores the node's part of a job, paused."""
        job, epoch = request.job, request.epoch
        with translated():
            if request.beside:
                self._require_current(job, epoch)
            else:
                self._admit(job, epoch)
            part = self.parts.get(job, epoch)
            if part is not None and part.record.started and part.client.alive:
                return RestoreResult(part.record.restored)  # before the agent was started again
            make = self._starter.keep if request.cut else self._starter.restore
            return self._calls.run(("restore", job, epoch), lambda: make(request))

    def stop(self, request: StopInput) -> StopResult:
        """Ends the node's part of a job, and what older epochs have left."""
        job, epoch = request.job, request.epoch
        with translated():
            before = self.parts.get(job, epoch)
            if request.only:
                self._ledger.note_void(job, epoch)
            else:
                self._ledger.note_stopped(job, epoch)
            self._end_up_to(job, epoch, request.grace_s, request.reason, only=request.only)
            return StopResult(epoch, before.progress if before else None)

    # ------------------------------------------------------------------ what an agent asks

    @property
    def numerics(self) -> NumericsClass:
        """Class of the node's devices; takes seconds the first time, and minutes where the build is missing."""
        return self._starter.numerics

    def jobs(self) -> tuple[JobOnNode, ...]:
        """What is here, with steps, for the node's record."""
        return tuple(part.on_node for part in self.parts.all())

    def seen(self, job: JobId) -> Epoch:
        """The highest epoch of a job that the node has seen."""
        return self._ledger.epochs(job).seen

    def end_fenced(self) -> None:
        """Ends parts of epochs below the one that counts, and looks at those that nobody attends.

        Raises:
            ErgoError: the fleet's store does not answer, or something does not end.
        """
        for job in {part.job for part in self.parts.all()}:
            head = self._fleet.head(job)
            if head is not None:
                self._see(job, head.epoch)
        for part in self.parts.all():
            if part.unattended_s > 0:
                with suppress(ErgoError):
                    part.look()

    def end_everything(self, reason: str) -> None:
        """Ends all that is here, parts that no record tells of included. Another incarnation may then begin."""
        for part in self.parts.all():
            self._end_up_to(part.job, part.epoch, 0.0, reason)
        for layout in self.parts.strangers():
            PartClient(layout).end()
        self._ledger.forget_epochs()
        self._volumes.keep_only(())

    def tidy(self, has_ended: Callable[[JobId], bool]) -> None:
        """Removes what is of no use to the jobs that are here.

        Args:
            has_ended: whether a job that is not here has ended for good.

        Raises:
            ErgoError: a store does not answer, or is damaged.
        """
        if size := self.storage.tidy(self._here(), has_ended=has_ended):
            _log.info("tidied", bytes=size)

    def _here(self) -> set[JobId]:
        return {part.job for part in self.parts.all()}

    def freeze(self, frozen: bool) -> None:
        """Holds, or lets go on, the jobs that must not run while their node is cut off."""
        for part in self.parts.all():
            if part.record.spec.on_lost_lease == "freeze":
                _log.warning("frozen" if frozen else "thawed", job=str(part.job), epoch=int(part.epoch))
                part.freeze(frozen)

    def transferred(self, job: JobId, epoch: Epoch) -> int:
        """Bytes that a transfer under way has brought so far."""
        return self.storage.pulled(job, epoch)

    # ------------------------------------------------------------------ epochs

    def _part(self, job: JobId, epoch: Epoch) -> Part:
        seen = self._ledger.epochs(job).seen
        if seen > epoch:
            raise fenced(job, epoch, seen)
        part = self.parts.get(job, epoch)
        if part is None or part.ended:
            raise unknown(job, epoch, self.node)
        return part

    def _require_current(self, job: JobId, epoch: Epoch) -> None:
        head = self._fleet.head(job)
        known = max(self._ledger.epochs(job).seen, head.epoch if head else Epoch(0))
        if known > epoch:
            raise fenced(job, epoch, known)

    def _admit(self, job: JobId, epoch: Epoch) -> None:
        """Refuses what is out of date, and ends what this epoch makes so."""
        self._require_current(job, epoch)
        self._see(job, epoch)

    def _see(self, job: JobId, epoch: Epoch) -> None:
        self._ledger.note_seen(job, epoch)
        older = [part for part in self.parts.of_job(job) if part.epoch < epoch]
        if older:
            last = older[-1].epoch
            self._ledger.note_stopped(job, last)
            self._end_up_to(job, last, 0.0, f"Epoch {epoch} of the job counts.")

    def _end_up_to(self, job: JobId, epoch: Epoch, grace_s: float, reason: str, *, only: bool = False) -> None:
        def meant(other: Epoch) -> bool:
            return other == epoch or (other < epoch and not only)

        with self.parts.lock(job):
            for part in self.parts.of_job(job):
                if meant(part.epoch):
                    _log.info("ends a part", job=str(job), epoch=int(part.epoch), reason=reason)
                    self.parts.end(part, grace_s)
        self._calls.forget(lambda key: key[1] == job and meant(key[2]))

    # ------------------------------------------------------------------ checkpoints

    def _write(self, part: Part, request: CheckpointInput) -> CheckpointResult:
        clock = Clock()
        kind = "full" if request.kind == "suspend" else request.kind
        written = part.client.write(request.cut, kind, ranks=request.ranks, deadline_s=request.deadline_s)
        clock.lap("write")
        pushed = self.storage.push(part.record.spec.tenant, written, (part.job, part.epoch))
        clock.lap("push")
        return CheckpointResult(
            parts=pushed,
            stored_bytes=written.stored_bytes,
            total_bytes=written.total_bytes,
            memory_bytes=min(
                self._memory[device] for device in part.record.placement.devices if device in self._memory
            ),
            timings_ms={**written.timings_ms, **clock.laps},
        )

    def _commit(self, part: Part, request: CheckpointInput) -> CheckpointResult:
        store = self.storage.store(part.record.spec.tenant)
        base = self._ledger.base(part.job, part.epoch)
        return Committer(self._fleet, store, part.record, self.numerics, base).commit(request)
