"""Moves a running job: it goes on at the target, or, should a step fail before the commit, where it is."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow

from model.control import Directive
from model.errors import ModelError
from model.ids import NodeId
from model.job_state import JobPhase
from model.placement import Placement, check_placement
from workflows.job import checkpoint, parts, start
from workflows.job.core import Job, placement_of
from workflows.job.errors import Fenced, OperationFailed
from workflows.job.preempt import runs_on

TARGET_PATIENCE = timedelta(seconds=10)

HEAD_S = 60.0
"""How long the commit of a move is tried before the record is asked whether it has happened."""


async def migrate(job: Job, directive: Directive) -> None:
    """From running at one place to running at another.

    Raises:
        OperationFailed: the job runs on where it was, or waits in the queue where that was not possible.
    """
    state = job.state
    source = state.placement
    if source is None:
        raise OperationFailed("The job holds no devices.", code="job.not-placed")
    try:
        check_placement(job.spec, placement_of(job.spec, directive, state.epoch.next))
    except ModelError as error:
        raise OperationFailed(str(error), code=error.code) from error
    if set(source.devices) & set(directive.devices):
        raise OperationFailed("A move to a device that the job has already is not possible.", code="job.same-device")
    job.operation = "migrate: copy ahead"
    target = placement_of(job.spec, directive, await start.allocate(job))
    overlap = tuple(node for node in target.nodes if node in source.nodes)
    try:
        # The target has nearly all of it when the ranks stop: they stand for what changes meanwhile only.
        ahead = await checkpoint.take(job, "live")
        clock = checkpoint.Clock()
        if not overlap:
            await start.bring(job, target, ahead.checkpoint.id, start.sources(job), clock, ahead=True)
    except OperationFailed as error:
        await _clean(job, target, overlap, error)
        raise
    job.transition(JobPhase.MOVING, directive.reason)
    try:
        cut = await checkpoint.take(job, "full")
    except OperationFailed as error:
        runs_on(job, f"It was not moved: {error.message}")
        await _clean(job, target, overlap, error)
        raise
    clock = checkpoint.Clock()
    clock.parts_ms = {**clock.parts_ms, **cut.parts_ms}
    try:
        await start.bring(job, target, cut.checkpoint.id, start.sources(job), clock)
        await start.restore(job, target, cut.checkpoint.id, clock)
        await _advance(job, target)
    except OperationFailed as error:
        await _undo(job, source, target, overlap, error)
        raise
    clock.lap("head")
    sources = tuple(node for node in source.nodes if node not in overlap)
    state.epoch, state.placement, state.cut = target.epoch, target, 0
    parts.attend(job, "restored")
    state.moves += 1
    clock.lap("attend")
    down_ms = (workflow.now() - cut.stopped_at).total_seconds() * 1000
    where = ", ".join(node.name for node in target.nodes)
    job.transition(
        JobPhase.RUNNING, f"It goes on at {where}: {directive.reason}", down_ms=down_ms, parts_ms=clock.parts_ms
    )
    await parts.stop_all(job, sources, source.epoch, f"epoch {target.epoch} runs at {where}")


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


async def _clean(job: Job, target: Placement, overlap: tuple[NodeId, ...], error: OperationFailed) -> None:
    """Nothing is left at the target of a move that has not begun to restore."""
    nodes = tuple(node for node in target.nodes if node not in overlap)
    left = await parts.stop_all(job, nodes, target.epoch, f"the move failed: {error.message}", patience=TARGET_PATIENCE)
    job.state.unstopped = (*job.state.unstopped, *left)


async def _undo(
    job: Job, source: Placement, target: Placement, overlap: tuple[NodeId, ...], error: OperationFailed
) -> None:
    """The move failed between its cut and its commit: away from the target, on at the source."""
    if error.code == "runtime.fenced" or job.reopen:
        return  # opening the record again puts all in order
    if overlap:
        # A restore with the new epoch has ended what a shared node had: there is no way back but the checkpoint.
        job.note("moved in vain", error.message)
        await parts.stop_all(job, target.nodes, target.epoch, f"the move failed: {error.message}")
        raise error
    # What was restored stays paused until it is attended: the source goes on at once, the target is cleaned after.
    await checkpoint.resume(job, source.nodes, job.state.cut)
    runs_on(job, f"It was not moved: {error.message}")
    await _clean(job, target, overlap, error)
