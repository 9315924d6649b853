"""Moves or resizes a running job: it goes on at the target, or, should a step fail before the commit, where it is.

Source and target may have nodes and devices in common. Such a node keeps what it has, held, beside what it restores,
until the job's `HEAD` says which of the two is the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from temporalio import workflow

from model.control import Directive
from model.errors import ModelError
from model.ids import CheckpointId, NodeId
from model.job_state import JobPhase
from model.manifest import RankState
from model.placement import Placement, check_placement
from model.requests import OperationResult
from model.runtime import RuntimeCode
from model.splicing import check_fit, check_width, measured_again, placed
from model.units import counted
from workflows.job import answers, checkpoint, parts, start
from workflows.job.core import Job, Request, placement_of
from workflows.job.errors import Fenced, OperationFailed
from workflows.job.preempt import runs_on
from workflows.job.state import MoveRequest

TARGET_PATIENCE = timedelta(seconds=10)

HEAD_S = 60.0
"""How long the commit of a move is tried before the record is asked whether it has happened."""

FRESH = timedelta(seconds=30)
"""A live checkpoint that is no older saves another one before a resize."""


async def prepare_resize(job: Job, request: Request) -> None:
    """Looks whether a person's wish for another width can be had, by a cut, and tells the scheduler of it.

    One for the width that the job has by now is kept: it asks for no other from then on.

    Raises:
        OperationFailed: it cannot be.
    """
    if job.state.phase is not JobPhase.RUNNING:
        raise OperationFailed(answers.not_running(job, "resized"), code="job.refused")
    if request.width == job.width and workflow.patched("wish-kept"):
        job.state.asked_width, job.dirty = request.width, True
        kept = f"It runs on {counted(request.width, 'device')}, and asks for no other number from now on."
        request.result = OperationResult(job.state.phase, kept, job.state.checkpoint)
        return
    job.operation = "resize: look at how the ranks hang together"
    if not _known(job):
        await _measured(job)
    check_resize(job, request.width)
    job.moving, job.state.move = request, MoveRequest(request.id, "", request.width)
    job.dirty = True


def check_resize(job: Job, width: int) -> None:
    """Checks that the job can run on so many devices, by what its newest cut has found.

    Raises:
        OperationFailed: it cannot.
    """
    state = job.state
    try:
        if state.parallelism is None:
            check_width(job.spec.world_size, width)
        else:
            check_fit(state.parallelism, placed(state.parallelism, width), device_memory(job))
    except ModelError as error:
        raise OperationFailed(str(error), code=error.code) from error


def device_memory(job: Job) -> int:
    """Bytes that a device of the job has, be it the job's own limit or the device's; 0 where nobody knows."""
    known = [size for size in (job.state.memory_bytes, job.spec.device_memory_bytes) if size]
    return min(known, default=0)


async def migrate(job: Job, directive: Directive, *, keep: bool = True) -> None:
    """From running at one place to running at another, or at another width, by a directive.

    Ranks that stay on their node `keep` their processes, where that can be.

    Raises:
        OperationFailed: the job runs on where it was, or waits in the queue where that was not possible.
    """
    state, resizes = job.state, directive.action == "resize"
    source = state.placement
    if source is None:
        raise OperationFailed("The job holds no devices.", code="job.not-placed")
    _check(job, source, directive)
    ready = await _make_ready(job, source, directive, keep)
    target, torn = ready.target, ready.torn
    job.transition(JobPhase.RESIZING if resizes else JobPhase.MOVING, directive.reason)
    not_done = "It was not resized" if resizes else "It was not moved"
    try:
        stopped_at, clock, saved = await _stop(job, source, ready)
    except OperationFailed as error:
        runs_on(job, f"{not_done}: {error.message}")
        await _clean(job, source, target, torn, error)
        raise
    beside, kept = () if torn else ready.overlap, tuple(ready.staying)
    come = not ready.all_stay and bool(kept)
    try:
        if not ready.all_stay:
            await start.bring(job, target, saved, start.sources(job), clock)
        await start.restore(job, target, saved, clock, beside=beside, cut=state.cut, kept=kept, come=come)
        await _advance(job, target)
    except OperationFailed as error:
        await _undo(job, source, target, torn, error, not_done)
        if error.code != RuntimeCode.UNSUITABLE or not come or job.reopen:
            raise
        job.note("processes not kept", error.message)
        await migrate(job, directive, keep=False)
        return
    clock.lap("head")
    state.epoch, state.placement, state.cut, state.unfit = target.epoch, target, 0, ()
    parts.attend(job, "restored")
    clock.lap("attend")
    down_ms = (workflow.now() - stopped_at).total_seconds() * 1000
    where = ", ".join(node.name for node in target.nodes)
    if resizes:
        state.resizes += 1
        if job.moving is not None and directive.request == job.moving.id:
            state.asked_width = target.width
        how = f"It goes on on {target.width} instead of {counted(source.width, 'device')}"
    else:
        state.moves += 1
        how = f"It goes on at {where}"
    sources = tuple(node for node in source.nodes if node not in torn)
    over = f"epoch {target.epoch} runs at {where}"
    if resizes:  # who hears of its new width may use the other devices: not said before nothing is left there
        await parts.stop_all(job, sources, source.epoch, over)
    job.transition(JobPhase.RUNNING, f"{how}: {directive.reason}", down_ms=down_ms, parts_ms=clock.parts_ms)
    if not resizes:
        await parts.stop_all(job, sources, source.epoch, over)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A target that has been made ready.

    Attributes:
        ahead: the live checkpoint that was brought there, or that the job goes back to should all be lost.
        overlap: nodes that are source and target.
        torn: of these the ones where the source has to be ended first, as histories of before have it.
        staying: ranks that keep their processes, by node.
    """

    target: Placement
    ahead: CheckpointId
    overlap: tuple[NodeId, ...] = ()
    torn: tuple[NodeId, ...] = ()
    staying: Mapping[NodeId, tuple[int, ...]] = field(default_factory=dict[NodeId, tuple[int, ...]])

    @property
    def all_stay(self) -> bool:
        """Only devices change."""
        return sum(map(len, self.staying.values())) == self.target.world_size


async def _make_ready(job: Job, source: Placement, directive: Directive, keep: bool) -> _Ready:
    """All that can be done before the ranks stop: they stand for what changes meanwhile only."""
    resizes = directive.action == "resize"
    staying = _staying(job, source, placement_of(job, directive, job.state.epoch.next)) if keep else {}
    if sum(map(len, staying.values())) == source.world_size and _patched():
        saved = (job.state.checkpoint if _known(job) else None) or await _measured(job)
        if resizes:
            check_resize(job, len(directive.devices))
        job.operation = f"{directive.action}: make ready"
        target = placement_of(job, directive, await start.allocate(job))
        try:
            await start.bring(job, target, saved, (), checkpoint.Clock(), ahead=True, staying=staying)
            return _Ready(target, saved, target.nodes, staying=staying)
        except OperationFailed as error:
            await _clean(job, source, target, (), error)
            if error.code != RuntimeCode.UNSUITABLE:
                raise
            job.note("processes not kept", error.message)
            staying = {}
    measured = None
    if resizes:
        measured = await _measured(job)
        check_resize(job, len(directive.devices))
    job.operation = f"{directive.action}: copy ahead"
    target = placement_of(job, directive, await start.allocate(job))
    overlap = tuple(node for node in target.nodes if node in source.nodes)
    torn = overlap if overlap and not workflow.patched("beside") else ()
    if torn or (staying and not workflow.patched("some-stay")):
        staying = {}
    try:
        ahead = measured or (await checkpoint.take(job, "live")).checkpoint.id
        if not torn:
            found = start.sources(job)
            await start.bring(job, target, ahead, found, checkpoint.Clock(), ahead=True, staying=staying)
    except OperationFailed as error:
        await _clean(job, source, target, torn, error)
        if staying and error.code == RuntimeCode.UNSUITABLE:
            job.note("processes not kept", error.message)
            return await _make_ready(job, source, directive, keep=False)
        raise
    return _Ready(target, ahead, overlap, torn, staying)


def _staying(job: Job, source: Placement, target: Placement) -> dict[NodeId, tuple[int, ...]]:
    """Ranks whose devices change at most, by node: a process cannot leave its node otherwise than by a checkpoint."""
    if job.spec.pack != "rank":
        return {}  # a tree sees its devices for life
    both = {node: {*source.ranks_at(node)} & {*target.ranks_at(node)} for node in target.nodes}
    return {node: tuple(sorted(ranks)) for node, ranks in both.items() if ranks}


async def _stop(job: Job, source: Placement, ready: _Ready) -> tuple[datetime, checkpoint.Clock, CheckpointId]:
    """The ranks stand: since when, what took how long, and the checkpoint that the target goes on from."""

    def check(states: list[RankState]) -> None:
        _check_again(job, ready.target, states)

    if ready.all_stay:
        held = await checkpoint.hold(job, check)
        return held.stopped_at, held.clock, ready.ahead
    if ready.staying:
        here = {node: {*source.ranks_at(node)} - {*ready.staying.get(node, ())} for node in source.nodes}
        leave = {node: tuple(sorted(ranks)) for node, ranks in here.items()}
        held, left = await checkpoint.leave(job, leave, check)
        return held.stopped_at, held.clock, left
    cut = await checkpoint.take(job, "full")
    clock = checkpoint.Clock()
    clock.parts_ms = {**clock.parts_ms, **cut.parts_ms}
    return cut.stopped_at, clock, cut.checkpoint.id


def _check(job: Job, source: Placement, directive: Directive) -> None:
    try:
        check_placement(job.spec, placement_of(job, directive, job.state.epoch.next))
    except ModelError as error:
        raise OperationFailed(str(error), code=error.code) from error
    if directive.action == "resize":
        if source.width == len(directive.devices):
            raise OperationFailed(f"The job runs on {counted(source.width, 'device')} already.", code="job.same-width")
    elif source.devices == directive.devices:
        raise OperationFailed("The job is there already.", code="job.same-device")


def _patched() -> bool:
    return workflow.patched("keep-processes")


def _known(job: Job) -> bool:
    """Whether a resize needs no checkpoint first: it is known who the replicas are, and what has been saved is whole.

    How much memory they have is asked when they stand; ranks that had nothing in common may have been cut at a bad
    moment.
    """
    state = job.state
    saved = state.checkpoint is not None and state.checkpoint not in state.damaged
    return saved and state.parallelism is not None and state.parallelism.copies > 1 and _patched()


def _check_again(job: Job, target: Placement, states: list[RankState]) -> None:
    if job.state.parallelism is not None and target.width < job.width:
        job.state.parallelism = measured_again(job.state.parallelism, states)
        check_resize(job, target.width)


async def _measured(job: Job) -> CheckpointId:
    """A live checkpoint of this epoch that is not old: from it the job's parallelism is known."""
    state = job.state
    last = state.checkpoints[-1] if state.checkpoints else None
    if last is not None and last.id == state.checkpoint and last.kind == "live" and state.parallelism is not None:
        since = job.attended_at
        if since is not None and last.time > max(since, workflow.now() - FRESH):
            return last.id
    return (await checkpoint.take(job, "live")).checkpoint.id


async def _advance(job: Job, target: Placement) -> None:
    """The commit. Where its answer is lost, the record tells whether it has happened."""
    try:
        await start.advance(job, target, HEAD_S)
    except Fenced:
        raise
    except OperationFailed:
        truth = await start.open_record(job)
        if truth.epoch != target.epoch:
            raise


async def _clean(
    job: Job, source: Placement, target: Placement, torn: tuple[NodeId, ...], error: OperationFailed
) -> None:
    """Nothing of the epoch that was called off is left at its target; what is there of the source goes on."""
    nodes = tuple(node for node in target.nodes if node not in torn)
    why = f"the move failed: {error.message}"
    left = await parts.stop_all(job, nodes, target.epoch, why, patience=TARGET_PATIENCE, only=source.nodes)
    # One that is a source too is told again by the next epoch, which ends all before it.
    job.state.unstopped = (*job.state.unstopped, *(node for node in left if node not in source.nodes))


async def _undo(
    job: Job, source: Placement, target: Placement, torn: tuple[NodeId, ...], error: OperationFailed, not_done: str
) -> None:
    """The move failed between its cut and its commit: away from the target, on at the source."""
    if error.code == "runtime.fenced" or job.reopen:
        return  # opening the record again puts all in order
    if torn:
        # Only in histories of before nodes restored `beside`: there is no way back but the checkpoint.
        job.note("moved in vain", error.message)
        await parts.stop_all(job, target.nodes, target.epoch, f"the move failed: {error.message}")
        raise error
    # What was restored stays paused until it is attended: the source goes on at once, the target is cleaned after.
    await checkpoint.resume(job, source.nodes, job.state.cut)
    runs_on(job, f"{not_done}: {error.message}")
    await _clean(job, source, target, torn, error)
