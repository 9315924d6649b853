"""The one seam that is faked for tests of a job's workflow: what its nodes do. Temporal is a real one."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from model.control import (
    AdvanceHeadInput,
    AdvanceHeadResult,
    AllocateEpochInput,
    AllocateEpochResult,
    OpenJobInput,
    OpenJobResult,
)
from model.ids import CheckpointId, DeviceId, Epoch, JobId, NodeId, Step
from model.manifest import CommunicatorState, RankParts, RankState
from model.runtime import (
    AttendInput,
    AttendResult,
    BarrierInput,
    BarrierResult,
    CheckpointInput,
    CheckpointResult,
    NodeParts,
    Outcome,
    Progress,
    RankExit,
    RestoreInput,
    RestoreResult,
    RuntimeCode,
    StopInput,
    StopResult,
    TransferInput,
    TransferResult,
)
from model.sharing import SharingIncidents
from proxy_runtime.errors import ErgoError
from proxy_runtime.storage.blobs import Bucket
from proxy_runtime.storage.fleet import FleetStore

TICK_S = 0.02


class Troubles:
    """What goes wrong, by the name of a call: each entry is the code of an error and how often it comes."""

    def __init__(self) -> None:
        self._wanted: dict[str, tuple[str, int]] = {}
        self.calls: Counter[str] = Counter()
        self.holds: dict[str, threading.Event] = {}

    def want(self, name: str, code: str, times: int = 1_000_000) -> None:
        """From now on `name` fails with `code`, so often."""
        self._wanted[name] = (code, times)

    def none(self) -> None:
        """Nothing goes wrong any more."""
        self._wanted.clear()

    def meet(self, *names: str) -> None:
        """A call begins, known by several names."""
        for name in names:
            self.calls[name] += 1
            if (hold := self.holds.get(name)) is not None:
                hold.wait(30)
            code, times = self._wanted.get(name, ("", 0))
            if times > 0:
                self._wanted[name] = (code, times - 1)
                raise ErgoError(f"The test wants {name} to fail.", code=code)


class Records(FleetStore):
    """The fleet's real store, with troubles."""

    def __init__(self, directory: Path, troubles: Troubles) -> None:
        super().__init__(Bucket.open(f"file://{directory}"), b"s" * 32)
        self.troubles = troubles
        self.advanced: list[tuple[JobId, Epoch]] = []

    def open_job(self, input: OpenJobInput) -> OpenJobResult:
        self.troubles.meet("open_job")
        return super().open_job(input)

    def allocate_epoch(self, input: AllocateEpochInput) -> AllocateEpochResult:
        self.troubles.meet("allocate_epoch")
        return super().allocate_epoch(input)

    def advance_head(self, input: AdvanceHeadInput) -> AdvanceHeadResult:
        self.troubles.meet("advance_head")
        result = super().advance_head(input)
        if (input.job, input.epoch) not in self.advanced:
            self.advanced.append((input.job, input.epoch))
        self.troubles.meet("advance_head.answer")
        return result


@dataclass(eq=False)
class FakePart:
    """Ranks of a job on a node. They do a step every tick, unless they are held."""

    epoch: Epoch
    ranks: tuple[int, ...]
    world: int = 1
    step: int = 0
    held: bool = False
    outcome: Outcome | None = None
    stopped: bool = False
    paused_by_restore: bool = False
    exits: tuple[RankExit, ...] = ()
    sharing: SharingIncidents | None = None

    @property
    def progress(self) -> Progress:
        return Progress(Step(self.step), self.step * 10, sharing=self.sharing)

    def end(self, outcome: Outcome, code: int = 0) -> None:
        self.exits = tuple(RankExit(rank, exit_code=code, last_words="the end") for rank in self.ranks)
        if outcome is Outcome.LOST:
            self.exits = tuple(RankExit(rank, signal=9) for rank in self.ranks)
        self.outcome = outcome


@dataclass(eq=False)
class FakeNode:
    """A node that obeys `model.runtime`, with steps instead of ranks."""

    id: NodeId
    records: Records
    troubles: Troubles
    checkpoints: dict[CheckpointId, dict[int, int]]
    parts: dict[tuple[JobId, Epoch], FakePart] = field(default_factory=dict)
    highest: dict[JobId, Epoch] = field(default_factory=dict)
    here: set[CheckpointId] = field(default_factory=set)
    started: Counter[tuple[JobId, Epoch]] = field(default_factory=Counter)
    stops: list[tuple[BarrierInput, int]] = field(default_factory=list)
    void: set[tuple[JobId, Epoch]] = field(default_factory=set)
    memory_bytes: int = 0
    peak_bytes: int = 100
    sketch: tuple[str, ...] = ("parameters",)
    stepless: bool = False

    def attend(self, request: AttendInput, report: Callable[[Progress], None]) -> AttendResult:
        self._meet(request.job, request.epoch, "attend", f"attend.{request.start}")
        key = (request.job, request.epoch)
        part = self.parts.get(key)
        if part is None:
            if request.start == "restored":
                raise ErgoError("Nothing of this job is here.", code=RuntimeCode.UNKNOWN)
            part = self.parts[key] = FakePart(
                request.epoch, request.placement.ranks_at(self.id), request.placement.world_size
            )
            self.started[key] += 1
        elif request.start == "restored" and part.outcome is None and part.paused_by_restore:
            part.paused_by_restore = part.held = False
            self.started[key] += 1
        while part.outcome is None:
            if not part.held and not self.stepless:
                part.step += 1
            report(part.progress)
            threading.Event().wait(TICK_S)
        return AttendResult(part.outcome, part.progress, part.exits)

    def barrier(self, request: BarrierInput) -> BarrierResult:
        self._meet(request.job, request.epoch, "barrier", f"barrier.{request.phase}")
        part = self._part(request.job, request.epoch)
        if request.phase == "resume":
            part.held = False
            return BarrierResult(True, self._states(part))
        if part.outcome is not None:
            raise ErgoError("The part has ended.", code=RuntimeCode.UNKNOWN)
        part.held = True
        if request.phase == "stop":
            self.stops.append((request, part.step))
        return BarrierResult(True, self._states(part), {"barrier": 1.0})

    def checkpoint(self, request: CheckpointInput) -> CheckpointResult:
        what = "write" if request.commit is None else "commit"
        self._meet(request.job, request.epoch, f"checkpoint.{what}", f"checkpoint.{what}.{request.kind}")
        part = self._part(request.job, request.epoch)
        if request.commit is None:
            if request.kind == "final":
                assert part.outcome is not None, "a final checkpoint of ranks that run"
            else:
                assert part.held, "a checkpoint of ranks that are not held"
            states = self._states(part)
            part.held = request.kind in ("full", "leaving")
            written = request.ranks if request.kind == "leaving" else part.ranks
            assert {*written} <= {*part.ranks}
            parts = NodeParts(self.id, tuple(RankParts(rank=rank) for rank in written), states)
            return CheckpointResult(
                parts=parts,
                stored_bytes=10,
                total_bytes=100,
                memory_bytes=self.memory_bytes,
                timings_ms={"stopped": 2.0},
            )
        there = {rank.rank for parts in request.commit for rank in parts.ranks}
        steps = {state.rank: int(state.step) for parts in request.commit for state in parts.states}
        if request.kind == "leaving":
            steps = {rank: step for rank, step in steps.items() if rank in there}
        text = f"{request.job} {request.epoch} {request.cut} {request.kind} {sorted(steps.items())}"
        checkpoint = CheckpointId("ck-" + hashlib.sha256(text.encode()).hexdigest()[:40])
        self.checkpoints[checkpoint] = steps
        self.here.add(checkpoint)
        if request.kind == "final":
            self.records.commit_final(request.job, request.epoch, checkpoint)
        elif request.kind != "leaving":
            self.records.commit_checkpoint(request.job, request.epoch, checkpoint, Step(min(steps.values())))
        self.troubles.meet(f"checkpoint.commit.{request.kind}.answer")
        return CheckpointResult(checkpoint=checkpoint)

    def transfer(self, request: TransferInput) -> TransferResult:
        what = "transfer.ahead" if request.ahead else "transfer.last"
        self._meet(request.job, request.epoch, "transfer", what, sees=False)
        assert request.checkpoint in self.checkpoints
        if request.keeps:
            self.troubles.meet("transfer.keeps")
            assert request.placement is not None
            before = self._before(request.job, request.epoch)
            here = request.placement.ranks_at(self.id)
            assert {*before.ranks} & {*here} if request.ranks else before.ranks == here, "who is kept stays"
            if not request.ranks:
                return TransferResult(0, 0)
        self.here.add(request.checkpoint)
        return TransferResult(1, 100, {"pull": 1.0})

    def restore(self, request: RestoreInput) -> RestoreResult:
        self._meet(request.job, request.epoch, "restore", sees=not request.beside)
        if (request.job, request.epoch) in self.void:
            raise ErgoError("The epoch was called off.", code=RuntimeCode.UNKNOWN)
        ranks = request.placement.ranks_at(self.id)
        world = request.placement.world_size
        if request.cut:
            self.troubles.meet("restore.kept")
            before = self._before(request.job, request.epoch)
            assert before.held and before.outcome is None, "processes of ranks that run are not kept"
            step = before.step
            if request.come:
                self.troubles.meet("restore.come")
                assert request.checkpoint in self.here, "a restore of what has not been brought"
                come = {*ranks} - {*before.ranks}
                assert come <= self.checkpoints[request.checkpoint].keys(), "who comes has been written"
                assert not ({*ranks} & {*before.ranks} & self.checkpoints[request.checkpoint].keys()), "who stays not"
            else:
                assert before.ranks == ranks, "every rank stays"
        else:
            assert request.checkpoint in self.here, "a restore of what has not been brought"
            steps = self.checkpoints[request.checkpoint]
            step = min(steps[rank] for rank in ranks)
        part = FakePart(request.epoch, ranks, world, step=step)
        part.held = part.paused_by_restore = True
        self.parts[request.job, request.epoch] = part
        return RestoreResult(self._states(part), {"load": 3.0})

    def stop(self, request: StopInput) -> StopResult:
        self.troubles.meet("stop", f"{self.id.name}.stop")
        if request.epoch < self.highest.get(request.job, 0):
            raise _fenced("a higher epoch is here")
        if request.only:
            self.void.add((request.job, request.epoch))
        else:
            self.highest[request.job] = request.epoch
        for (job, epoch), part in self.parts.items():
            if job == request.job and (epoch == request.epoch or (epoch < request.epoch and not request.only)):
                part.outcome, part.stopped = part.outcome or Outcome.STOPPED, True
        return StopResult(request.epoch)

    def transferred(self, job: JobId, epoch: Epoch) -> int:
        return 0

    def part(self, job: str) -> FakePart:
        """The newest part of a job."""
        return max((part for (name, _), part in self.parts.items() if name == job), key=lambda part: part.epoch)

    def running(self, job: str) -> bool:
        """Whether ranks of the job do steps here."""
        parts = [part for (name, _), part in self.parts.items() if name == job]
        return any(part.outcome is None and not part.held for part in parts)

    def device(self, index: int) -> DeviceId:
        return DeviceId(self.id, (f"cpu-{index}",))

    def _meet(self, job: JobId, epoch: Epoch, *names: str, sees: bool = True) -> None:
        self.troubles.meet(*names, *(f"{self.id.name}.{name}" for name in names))
        if epoch < self.highest.get(job, 0):
            raise _fenced("a higher epoch is here")
        if not sees:
            return
        self.highest[job] = epoch
        for (other, old), part in self.parts.items():
            if other == job and old < epoch:
                part.outcome = part.outcome or Outcome.STOPPED

    def _before(self, job: JobId, epoch: Epoch) -> FakePart:
        """The part whose processes that of an epoch keeps."""
        return max((part for (name, e), part in self.parts.items() if name == job and e < epoch and not part.stopped),
                   key=lambda part: part.epoch)  # fmt: skip

    def _part(self, job: JobId, epoch: Epoch) -> FakePart:
        part = self.parts.get((job, epoch))
        if part is None or part.stopped:
            raise ErgoError("Nothing of this job is here.", code=RuntimeCode.UNKNOWN)
        return part

    def _states(self, part: FakePart) -> tuple[RankState, ...]:
        members = tuple(range(part.world))
        world = CommunicatorState(name="world", members=members, contributed=part.step, completed=part.step)
        return tuple(
            RankState(
                rank=rank,
                step=Step(part.step),
                communicators=(world,) if part.world > 1 else (),
                peak_bytes=self.peak_bytes,
                sketch=self.sketch,
            )
            for rank in part.ranks
        )


class NoFates:
    """Nobody asks what has become of a job."""

    def __init__(self) -> None:
        self.closed_as: str | None = None

    def closed(self, job: JobId) -> str | None:
        return self.closed_as


def _fenced(why: str) -> ErgoError:
    return ErgoError(f"Fenced: {why}.", code=RuntimeCode.FENCED)
