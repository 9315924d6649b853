"""Puts a job on devices: fresh, or from the newest checkpoint that its record names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from temporalio import workflow

from model.control import (
    AdvanceHeadInput,
    AdvanceHeadResult,
    AllocateEpochInput,
    AllocateEpochResult,
    Directive,
    OpenJobInput,
    OpenJobResult,
)
from model.ids import CheckpointId, Epoch, NodeId
from model.job_state import JobPhase
from model.names import Activity
from model.placement import Placement, check_placement
from model.runtime import RestoreInput, RestoreResult, RuntimeCode, TransferInput, TransferResult
from workflows.job import parts
from workflows.job.calls import control, each, on_node
from workflows.job.checkpoint import Clock
from workflows.job.core import Job, placement_of
from workflows.job.cut import lowest_step, slowest
from workflows.job.errors import OperationFailed

TRANSFER_S = 1800.0
RESTORE_S = 900.0


async def start(job: Job, directive: Directive) -> None:
    """From queued or suspended to running, by a directive ``place``; back to queued where it fails."""
    state = job.state
    placement = placement_of(job, directive, state.epoch.next)
    check_placement(job.spec, placement)
    state.waiting, state.placement = "", placement
    job.operation = "start"
    job.transition(JobPhase.STARTING, directive.reason)
    clock = Clock()
    counts = False
    try:
        truth = await open_record(job)
        epoch = await allocate(job)
        placement = placement_of(job, directive, epoch)
        head = await advance(job, placement)
        # Nodes that have said before that nothing is left are not asked again: they may be gone since.
        before = head.before if truth.epoch > state.stopped_epoch else ()
        before, old = (*before, *state.unstopped), state.epoch
        state.epoch, state.placement, state.cut, counts = epoch, placement, 0, True
        state.unfit = ()
        job.show()
        if before:
            await parts.stop_all(job, before, max(old, Epoch(epoch - 1)), f"epoch {epoch} begins")
        state.unstopped, state.stopped_epoch = (), max(old, Epoch(epoch - 1))
        clock.lap("head")
        checkpoint = _sound(job, truth.checkpoint)
        if checkpoint is None:
            parts.attend(job, "fresh")
        else:
            await bring(job, placement, checkpoint, sources(job, before), clock)
            await restore(job, placement, checkpoint, clock)
            parts.attend(job, "restored")
        _running(job, checkpoint, clock)
    except OperationFailed as error:
        await _back(job, error, counts=counts)
        raise


def _running(job: Job, checkpoint: CheckpointId | None, clock: Clock) -> None:
    state = job.state
    down_ms = None
    if state.stopped_at is not None:
        down_ms = (workflow.now() - state.stopped_at).total_seconds() * 1000
        clock.parts_ms["waiting"] = max(0.0, down_ms - sum(v for k, v in clock.parts_ms.items() if "." not in k))
        state.stopped_at = None
    how = "It runs from its first step." if checkpoint is None else f"It goes on from step {state.step} ({checkpoint})."
    job.transition(JobPhase.RUNNING, how, down_ms=down_ms, parts_ms=clock.parts_ms)


async def _back(job: Job, error: OperationFailed, *, counts: bool) -> None:
    """The start failed: nothing of its epoch, if it counts already, is left, and the job waits again."""
    state = job.state
    if error.code == RuntimeCode.DAMAGED:
        give_up_checkpoint(job)
    if job.reopen or error.code == RuntimeCode.FENCED:
        return  # opening the record again puts all in order
    if counts and state.placement is not None:
        await parts.end_epoch(job, f"the start failed: {error.message}")
    state.placement = None
    job.parts = {}
    state.waiting = f"The start failed: {error.message}"
    job.transition(JobPhase.QUEUED, state.waiting)


async def open_record(job: Job) -> OpenJobResult:
    """What counts of the job: whatever the workflow believes, its record decides."""
    info = workflow.info()
    request = OpenJobInput(job.state.job, job.spec.tenant, job.state.first_run, info.run_id)
    result = await control(job, Activity.OPEN_JOB, request, OpenJobResult, story="open the job's record")
    job.state.cluster, job.state.search_attributes = result.cluster, result.search_attributes
    return result


async def allocate(job: Job) -> Epoch:
    """An epoch that nobody has had."""
    request = AllocateEpochInput(job.state.job, workflow.info().run_id)
    result = await control(job, Activity.ALLOCATE_EPOCH, request, AllocateEpochResult, story="take the next epoch")
    return result.epoch


async def advance(job: Job, placement: Placement, limit_s: float | None = None) -> AdvanceHeadResult:
    """Makes the placement's epoch the one that counts."""
    request = AdvanceHeadInput(job.state.job, workflow.info().run_id, placement.epoch, placement.nodes)
    story = f"epoch {placement.epoch} counts from now on"
    return await control(job, Activity.ADVANCE_HEAD, request, AdvanceHeadResult, story=story, limit_s=limit_s)


async def bring(
    job: Job,
    placement: Placement,
    checkpoint: CheckpointId,
    found: tuple[NodeId | Literal["store"], ...],
    clock: Clock,
    *,
    ahead: bool = False,
    staying: Mapping[NodeId, tuple[int, ...]] | None = None,
) -> None:
    """Brings a checkpoint to the nodes of a placement; `ahead`, they are made ready for the restore of a later one.

    On nodes where ranks are `staying`, they are made ready to keep those; if all do, nothing is brought there.

    What is done ahead is tried once: proxies of all its nodes meet, and one that tried again alone would wait for
    others that have met those of before. It has no purpose any more once the job has ended.
    """
    once = ahead and workflow.patched("ahead-once")
    kept = staying or {}
    # A tree is on one node as a whole; of whom everybody stays nothing is needed.
    whole = job.spec.pack == "node" or sum(map(len, kept.values())) == placement.world_size

    async def transfer(node: NodeId) -> TransferResult:
        request = TransferInput(
            job.state.job,
            placement.epoch,
            checkpoint,
            found,
            TRANSFER_S,
            ahead=ahead,
            tenant=job.spec.tenant,
            ranks=() if whole else placement.ranks_at(node),
            spec=job.spec if ahead else None,
            placement=placement if ahead else None,
            keeps=node in kept,
        )
        story = f"bring {checkpoint[:11]} to {node.name}" + (" while the job runs" if ahead else "")
        if node in kept and not request.ranks:
            story = f"epoch {placement.epoch}: make devices of {node.name} ready while the job runs"
        return await on_node(
            job,
            Activity.TRANSFER,
            node,
            request,
            TransferResult,
            story=story,
            limit_s=TRANSFER_S,
            attempts=1 if once else 5,
            moot=(lambda: parts.moot(job)) if once else None,
        )

    await each(placement.nodes, transfer)
    clock.lap("ahead" if ahead else "transfer")


async def restore(
    job: Job,
    placement: Placement,
    checkpoint: CheckpointId,
    clock: Clock,
    beside: tuple[NodeId, ...] = (),
    cut: int = 0,
    kept: tuple[NodeId, ...] = (),
    come: bool = False,
) -> None:
    """Makes the job's parts from a checkpoint, paused; on the nodes `beside` those of the epoch before stay.

    On those that are `kept` they are held at a `cut`, and ranks that stay keep their processes. Where others `come`,
    the checkpoint has what has left all nodes.
    """

    async def one(node: NodeId) -> RestoreResult:
        request = RestoreInput(
            job.state.job,
            placement.epoch,
            node,
            job.spec,
            placement,
            checkpoint,
            RESTORE_S,
            beside=node in beside,
            cut=cut if node in kept else 0,
            come=come and node in kept,
        )
        story = f"epoch {placement.epoch}: {'keep processes' if node in kept else 'restore'} on {node.name}"
        return await on_node(
            job, Activity.RESTORE, node, request, RestoreResult, story=story, limit_s=RESTORE_S, attempts=2
        )

    results = await each(placement.nodes, one)
    clock.lap("restore")
    for name, value in slowest([result.timings_ms for result in results]).items():
        clock.parts_ms[f"node.{name}"] = value
    job.state.step = lowest_step((rank for result in results for rank in result.ranks), job.spec.pack) or job.state.step


def sources(job: Job, also: tuple[NodeId, ...] = ()) -> tuple[NodeId | Literal["store"], ...]:
    """Where chunks may be, nearest first: nodes that had the job and are not lost, then the store."""
    nodes = dict.fromkeys((*also, *job.state.checkpoint_nodes))
    alive: list[NodeId | Literal["store"]] = [node for node in nodes if not job.is_lost(node)]
    return (*alive, "store")


def _sound(job: Job, newest: CheckpointId | None) -> CheckpointId | None:
    """The newest checkpoint that has not been found damaged."""
    state = job.state
    if newest is not None and newest not in state.damaged:
        if newest != state.checkpoint:
            state.checkpoint, state.checkpoint_nodes = newest, ()
        return newest
    earlier = [view for view in state.checkpoints if view.id not in state.damaged and view.kind != "final"]
    state.checkpoint = earlier[-1].id if earlier else None
    if state.checkpoint is None and newest is not None:
        raise OperationFailed(
            "None of the job's checkpoints can be read; it is not started from the beginning by itself.",
            code="job.no-checkpoint",
        )
    return state.checkpoint


def give_up_checkpoint(job: Job) -> None:
    """The checkpoint cannot be read: an earlier one is taken from now on."""
    if job.state.checkpoint is not None:
        job.note("damaged", f"Checkpoint {job.state.checkpoint} cannot be read; an earlier one is taken.")
        job.state.damaged.append(job.state.checkpoint)
