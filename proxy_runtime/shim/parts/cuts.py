"""The cuts of a part, phase by phase, and the watchdog that lets the job run on when the next phase does not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from model.ids import NodeId
from model.manifest import PartRef, RankParts, RankState
from model.runtime import BarrierResult, NodeParts, Outcome, RuntimeCode
from proxy_runtime.checkpoint.files import free_bytes
from proxy_runtime.checkpoint.parts import Part
from proxy_runtime.checkpoint.writer import CheckpointWriter, WrittenParts
from proxy_runtime.cut.cutter import Cutter
from proxy_runtime.cut.living import death, require_living
from proxy_runtime.errors import ErgoError
from proxy_runtime.shim.generation import Generation
from proxy_runtime.shim.header import sketch_in, sketched
from proxy_runtime.shim.part import Limits, PartWritten, Phase
from proxy_runtime.shim.spec import CutReport, RunError
from proxy_runtime.shim.workers import in_background

if TYPE_CHECKING:
    from proxy_runtime.shim.parts.job import PartJob

Kind = Literal["live", "full", "leaving", "final"]

WARM_S = 20.0
"""How long the files of a live cut are kept after it, for their memory: a resize takes its full one seconds later, and
a machine whose free memory has gone back to its host has it again at a tenth of the speed."""

ROOMY = 10
"""They are kept where the disk has so many times as much free."""


@dataclass(frozen=True, slots=True)
class DumpedDevices:
    """What the devices held at a cut.

    Attributes:
        scratch: the files, as `proxy_runtime.cut.dumped` says; there until the cut is over.
        states: where the ranks stood.
        ms: how long it took.
        volume: the job's directory as it stands meanwhile; None where nobody has looked, and the ranks may run.
    """

    scratch: Path
    states: tuple[RankState, ...]
    ms: float
    volume: PartRef | None = None


@dataclass(slots=True)
class _Cut:
    """A cut that was begun.

    Attributes:
        phase: where it stands; RUNNING once it is over.
        until: when the watchdog calls it off, as `time.monotonic` counts; None while an operation is under way.
        packing: what was dumped is being written; its files are needed.
        results: of the phases that are done, by name: a repeated call returns them.
        devices: what was dumped of them together with the ranks that leave.
        why: it was called off, as a sentence and its remedy: a repeated call is told the same.
    """

    number: int
    cutter: Cutter
    report: CutReport
    phase: Phase = Phase.RUNNING
    until: float | None = None
    packing: bool = False
    results: dict[str, BarrierResult] = field(default_factory=dict[str, BarrierResult])
    devices: DumpedDevices | None = None
    why: tuple[str, str] | None = None

    @property
    def open(self) -> bool:
        return self.phase is not Phase.RUNNING

    def failed(self, error: BaseException) -> None:
        """Keeps what went wrong."""
        if isinstance(error, ErgoError):
            self.why = (error.message, error.remedy)


class PartCuts:
    """Takes the cuts of one part."""

    def __init__(self, job: PartJob, limits: Limits) -> None:
        self._job = job
        self._limits = limits
        self._cut: _Cut | None = None
        self._written: dict[tuple[int, str], PartWritten] = {}
        self._writing = threading.Lock()  # one writes at a time; the ranks may run meanwhile
        self._given_up = 0  # up to this one nobody wants a cut any more
        self._steps = _Steps()
        self._warm: tuple[Cutter, float] | None = None  # of the last live cut, and until when its files are kept

    @property
    def number(self) -> int:
        """Of the last cut, 0 before the first."""
        return self._cut.number if self._cut is not None else 0

    # ------------------------------------------------------------------ phases

    def stop_queues(self, cut: int, *, at_step: int | None, prefer_step_s: float, deadline_s: float) -> BarrierResult:
        """See `PartClient.stop_queues`."""
        job = self._job
        with job.operation():
            last = self._cut
            if last is not None and last.number == cut and last.open:
                return last.results["stop"]
            if last is not None and last.number >= cut:
                raise _over(cut, last)
            self._call_off("a later cut was begun")
            generation = self._require_running()
            report = CutReport(epoch=job.part.epoch)
            in_background(self._cool, float("inf"))  # while the end of a step is waited for
            scratch = generation.layout.cut(generation.epoch, cut)
            self._cut = fresh = _Cut(cut, Cutter(generation, job.tool(), scratch, report), report, Phase.STOPPED)
            step_s = prefer_step_s if prefer_step_s > 0 else deadline_s
            wanted = prefer_step_s > 0 and self._steps.likely_within(prefer_step_s)
            if at_step is None and wanted:  # the end of the step that the foremost rank is in
                # As the proxies count them: of a channel, those of the process that has it now.
                at_step = max(rank.ring.step_done for rank in generation.ranks if rank.ring is not None) + 1
            with self._phase(fresh, Phase.STOPPED, self._limits.stopped):
                job.delivered.stop()
                fresh.cutter.stop(
                    at_step=at_step,
                    step_deadline_s=step_s,
                    deadline_s=deadline_s,
                    given_up=lambda: self._given_up >= cut,
                )
                fresh.results["stop"] = self._barrier(fresh)
            return fresh.results["stop"]

    def finish(self, cut: int, targets: Mapping[str, int], *, deadline_s: float) -> BarrierResult:
        """See `PartClient.finish`."""
        with self._job.operation():
            current = self._require_open(cut)
            if "finish" not in current.results:
                with self._phase(current, Phase.FINISHED, self._limits.stopped):
                    current.cutter.finish(targets, deadline_s=deadline_s)
                    current.results["finish"] = self._barrier(current)
            return current.results["finish"]

    def write(self, cut: int, kind: Kind, *, ranks: Collection[int] = (), deadline_s: float) -> PartWritten:
        """See `PartClient.write`."""
        with self._writing:
            key = (cut, kind)
            if key not in self._written:
                only = ranks if kind == "leaving" else None
                found = self._write_final(cut) if kind == "final" else self._write(cut, kind, only, deadline_s)
                self._written = {key: found}
            return self._written[key]

    def resume(self, cut: int) -> None:
        """See `PartClient.resume`."""
        self._given_up = max(self._given_up, cut)
        with self._job.operation():
            if self._cut is not None and self._cut.number <= cut:
                self._call_off("")

    def dump_devices(self, cut: int, *, deadline_s: float) -> DumpedDevices:
        """Dumps what the devices hold, for the part of the next epoch, which keeps the processes.

        They are not looked at, and run until they wait for an answer; where some ranks leave, all has been dumped with
        those, and the others stand.

        Raises:
            RunError: the cut is over, is not finished, or was written; a proxy died; a deadline. The job runs on.
        """
        with self._job.operation():
            current = self._require_open(cut)
            if current.devices is not None:
                return current.devices
            current = self._require_finished(cut)
            with self._phase(current, Phase.FROZEN, self._limits.frozen):
                current.cutter.dump_devices(deadline_s=deadline_s)
            states = self._job.states(current.cutter.counts)
            return DumpedDevices(current.cutter.scratch, states, current.report.ms.get("device", 0.0))

    # ------------------------------------------------------------------ the watchdog

    def watch(self) -> None:
        """Calls off a cut whose next phase has not come in time, and sees whether the job takes steps."""
        if self._job.generation is not None and self._job.phase is Phase.RUNNING:
            self._steps.look(max(self._job.generation.step(), default=0))
        self._cool(time.monotonic())
        cut = self._cut
        if cut is None or cut.until is None or time.monotonic() < cut.until:
            return
        with self._job.try_operation() as free:
            if free and cut is self._cut and cut.until is not None and time.monotonic() >= cut.until:
                self._job.event("watchdog", cut=cut.number, phase=cut.phase)
                self._call_off("the next phase did not come in time")

    def abandon(self) -> None:
        """The part is over: there is nothing left to cut."""
        if self._cut is not None:
            self._cut.until = None

    def close(self) -> None:
        """Another part has the processes: nothing is called off any more, and no file of a cut is needed."""
        cut = self._cut
        if cut is not None and cut.open:
            cut.phase, cut.until = Phase.RUNNING, None
            in_background(cut.cutter.discard)
        in_background(self._cool, float("inf"))

    # ------------------------------------------------------------------ helpers

    @contextmanager
    def _phase(self, cut: _Cut, reached: Phase, limit_s: float) -> Iterator[None]:
        """A phase is reached, and the watchdog counts, or the cut is called off and the job runs on."""
        cut.until = None
        try:
            self._require_living()
            yield
            self._require_living()
        except BaseException as failure:
            error = self._death() or failure
            cut.failed(error)
            self._call_off(str(error))
            if isinstance(error, ErgoError) and error.code.endswith(".deadline"):
                raise RunError(error.message, code=RuntimeCode.DEADLINE, remedy=error.remedy) from failure
            if error is not failure:
                raise error from failure
            raise
        cut.phase = reached
        cut.until = time.monotonic() + limit_s
        self._job.set_phase(reached)

    def _cool(self, now: float) -> None:
        """Removes the files of the last live cut, where they have been kept long enough."""
        warm = self._warm
        if warm is not None and now >= warm[1]:
            self._warm = None
            warm[0].discard()

    def _roomy(self, cut: _Cut) -> bool:
        assert self._job.generation is not None
        size = cut.report.image_bytes + cut.report.device_bytes
        return free_bytes(self._job.generation.layout.root) >= ROOMY * size

    def _death(self) -> RunError | None:
        """Who has died, where that is why a phase failed: what it failed at is no news then."""
        generation = self._job.generation
        return death(generation) if generation is not None else None

    def _require_living(self) -> None:
        """Before and after each phase: a rank may die at any moment, and what is left of its job is no checkpoint."""
        if self._job.generation is not None:
            require_living(self._job.generation)
        self._require_not_ended()

    def _require_not_ended(self) -> None:
        result = self._job.result
        if result is not None and result.outcome is not Outcome.COMPLETED:
            raise RunError("the part has ended; there is nothing to cut.", code="run.ended")

    def _call_off(self, reason: str) -> None:
        """Lets the job run on, if a cut is open."""
        cut, generation = self._cut, self._job.generation
        if cut is None or not cut.open or generation is None:
            return
        if self._job.succession is not None and not self._job.succession.refuse():
            return  # the processes are another part's by now
        cut.phase, cut.until = Phase.RUNNING, None
        generation.release()
        if not cut.packing:
            cut.cutter.discard()
        self._runs_on()
        if reason:
            self._job.event("called-off", cut=cut.number, reason=reason)

    def _runs_on(self) -> None:
        if not self._job.over:
            self._job.delivered.start()
        self._job.set_phase(Phase.RUNNING)

    def _require_running(self) -> Generation:
        generation = self._job.generation
        if generation is None or self._job.phase is not Phase.RUNNING:
            raise RunError(
                f"the part is {self._job.phase} and does not run yet.",
                code=RuntimeCode.STARTING,
                remedy="Ask again once it runs.",
            )
        self._require_not_ended()
        return generation

    def _require_open(self, number: int) -> _Cut:
        cut = self._cut
        if cut is None or number > cut.number:
            raise RunError(f"cut {number} was not begun.", code="run.order", remedy="Stop the queues first.")
        if number < cut.number or not cut.open:
            raise _over(number, cut)
        return cut

    def _require_finished(self, number: int) -> _Cut:
        cut = self._require_open(number)
        if "finish" not in cut.results:
            raise RunError(f"cut {number} is not finished.", code="run.order")
        if cut.phase is Phase.FROZEN:
            raise RunError(f"cut {number} is frozen and was written before.", code="run.order")
        return cut

    def _barrier(self, cut: _Cut) -> BarrierResult:
        states = self._job.states(cut.cutter.counts)
        return BarrierResult(reached=cut.report.reached_step, ranks=states, timings_ms=dict(cut.report.ms))

    def _write(self, number: int, kind: Kind, only: Collection[int] | None, deadline_s: float) -> PartWritten:
        job, stays = self._job, kind != "live"
        with job.operation():
            cut = self._require_finished(number)
            with self._phase(cut, Phase.FROZEN, self._limits.frozen):
                writer = job.open_store().begin(job.spec.job_id, job.part.epoch)
                try:
                    start, created_at_ns = time.perf_counter(), time.time_ns()
                    cut.cutter.dump(writer, hold=stays, deadline_s=deadline_s, only=only)
                    states = job.states(cut.cutter.counts)
                    cut.report.ms["frozen"] = (time.perf_counter() - start) * 1e3
                    cut.packing = True
                except BaseException:
                    writer.abort()
                    raise
            if stays:
                cut.until = None  # from when all is written
            else:
                self._call_off("")
        try:
            written = self._pack(cut, writer, kind)
        except BaseException as error:
            cut.failed(error)
            if stays:
                with job.operation():
                    if cut is self._cut:
                        self._call_off(str(error))
            raise
        if stays and cut.open:
            cut.until = time.monotonic() + self._limits.frozen
        if kind == "leaving":
            device_ms = cut.report.ms.get("device", 0.0)
            cut.devices = DumpedDevices(cut.cutter.scratch, states, device_ms, written.refs[Part.volume()])
        parts = NodeParts(
            node=NodeId.parse(job.part.node),
            ranks=tuple(
                RankParts(
                    rank=r,
                    process=written.refs.get(Part.process(r)),
                    device=written.refs.get(Part.device(r)),
                    exit_code=cut.cutter.exits.get(r),
                )
                for r in job.part.ranks
                if only is None or r in only
            ),
            states=sketched(states, sketch_in(writer)),
            volume=written.refs.get(Part.volume()),
        )
        return _report(parts, written, created_at_ns, cut.report.ms)

    def _pack(self, cut: _Cut, writer: CheckpointWriter, kind: Kind) -> WrittenParts:
        start = time.perf_counter()
        packed = False
        try:
            with writer:
                cut.cutter.pack(writer)
                written = writer.finish_parts()
            if kind == "full":  # the epoch after this one may be on this node, too
                cut.cutter.keep(written.refs)
            packed = True
            return written
        finally:
            cut.packing = False
            if packed and not cut.open and cut is self._cut and self._roomy(cut):
                self._warm = cut.cutter, time.monotonic() + WARM_S
            elif not (packed and cut.open):
                cut.cutter.discard()
            cut.report.ms["write"] = (time.perf_counter() - start) * 1e3

    def _write_final(self, number: int) -> PartWritten:
        job = self._job
        with job.operation():
            generation = job.generation
            if generation is None or job.result is None or generation.living():
                raise RunError("the ranks have not ended; a final checkpoint comes after them.", code="run.order")
            created_at_ns = time.time_ns()
            with job.open_store().begin(job.spec.job_id, job.part.epoch) as writer:
                writer.add_tree(Part.volume(), generation.layout.volume)
                written = writer.finish_parts()
            parts = NodeParts(
                node=NodeId.parse(job.part.node),
                ranks=tuple(
                    RankParts(rank=rank.rank, exit_code=rank.exit.code if rank.exit is not None else None)
                    for rank in generation.ranks
                ),
                states=job.states({}),
                volume=written.refs[Part.volume()],
            )
            return _report(parts, written, created_at_ns, {})


@dataclass(slots=True)
class _Steps:
    """When the job's last step was seen to end."""

    count: int = 0
    at: float | None = None

    def look(self, count: int) -> None:
        if count != self.count:
            self.count, self.at = count, time.monotonic()

    def likely_within(self, seconds: float) -> bool:
        """Not for a script that takes no steps, or whose steps last longer: it would be waited for in vain."""
        return self.at is not None and time.monotonic() - self.at <= seconds


def _report(parts: NodeParts, written: WrittenParts, created_at_ns: int, ms: Mapping[str, float]) -> PartWritten:
    return PartWritten(
        parts=parts,
        packs=written.packs,
        stored_bytes=written.stored_bytes,
        total_bytes=sum(ref.bytes for ref in written.refs.values()),
        created_at_ns=created_at_ns,
        timings_ms=dict(ms),
    )


def _over(number: int, last: _Cut) -> RunError:
    """What is asked for a cut that is over: whoever asks again after a failure is to hear of that failure."""
    sentence, remedy = f"cut {number} is over and the job runs on.", "Ask for another one."
    if number == last.number and last.why is not None:
        sentence, remedy = last.why
    return RunError(sentence, code=RuntimeCode.DEADLINE, remedy=remedy)
