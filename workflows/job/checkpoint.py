"""Takes a cut over all nodes and a checkpoint there. Fails without harm: the job then runs on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from temporalio import workflow

from model.control import CheckpointView
from model.ids import CheckpointId, NodeId, Step
from model.manifest import RankState
from model.names import Activity
from model.runtime import (
    BarrierInput,
    BarrierResult,
    CheckpointInput,
    CheckpointResult,
    CollectiveTarget,
    NodeParts,
    Outcome,
    RuntimeCode,
)
from model.splicing import parallelism
from model.units import counted
from workflows.job import parts
from workflows.job.calls import each, every, on_node
from workflows.job.core import Job
from workflows.job.cut import first_node, lowest_step, slowest, targets
from workflows.job.errors import Fenced, Interrupted, NodeLost, OperationFailed

_Kind = Literal["live", "full", "leaving", "final"]

STOP_S = 30.0
"""Seconds in which every queue of a node comes to a message boundary, beside the wait for the end of a step."""

BEGINNING = timedelta(seconds=30)
"""How long after a placement a node may not know of it yet."""

CATCH_UP_S = 2.0
"""Seconds that other nodes are given to come to the end of a step that the first one stands at: with its collectives
done there, all that is left to do is the optimizer's."""

KEEPING = timedelta(minutes=10)
"""How long the directory of a job that has ended is tried to be kept."""

WRITE_S = 1800.0
COMMIT_S = 300.0
RESUME_S = 30.0


@dataclass(frozen=True, slots=True)
class CutResult:
    """A committed checkpoint; `stopped_at` is when all ranks stood, `parts_ms` what took how long."""

    checkpoint: CheckpointView
    stopped_at: datetime
    parts_ms: dict[str, float]


class Clock:
    """Times the parts of an operation, in milliseconds of workflow time."""

    def __init__(self) -> None:
        self._last = workflow.now()
        self.parts_ms: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """The part `name` is over."""
        now = workflow.now()
        self.parts_ms[name] = self.parts_ms.get(name, 0.0) + _ms(self._last, now)
        self._last = now


@dataclass(frozen=True, slots=True)
class HeldCut:
    """A finished cut at which all ranks stand, since `stopped_at`; the `clock` goes on from there."""

    number: int
    stopped_at: datetime
    clock: Clock


@dataclass(frozen=True, slots=True)
class _Stand:
    held: HeldCut
    finished: list[BarrierResult]


async def take(job: Job, kind: Literal["live", "full"]) -> CutResult:
    """Takes a checkpoint. After a ``full`` one the ranks stand still; after a ``live`` one they run.

    Raises:
        OperationFailed: nothing has changed, and the ranks have been told to go on.
    """
    began = workflow.now()
    async with _cut(job) as nodes:
        return await _take(job, kind, nodes, began)


async def hold(job: Job, check: Callable[[list[RankState]], None]) -> HeldCut:
    """Stops the ranks at a cut and writes nothing.

    Args:
        job: the job.
        check: raises OperationFailed where it should rather run on, by where the ranks stand and what they have.

    Raises:
        OperationFailed: nothing has changed, and the ranks have been told to go on.
    """
    async with _cut(job) as nodes:
        stand = await _stand(job, "resize", nodes)
        _stopped(job, stand, check)
        return stand.held


async def leave(
    job: Job, ranks: Mapping[NodeId, tuple[int, ...]], check: Callable[[list[RankState]], None]
) -> tuple[HeldCut, CheckpointId]:
    """Stops the ranks at a cut and writes those that leave their nodes, and the job's directory.

    Args:
        job: the job.
        ranks: those that leave, by node.
        check: as of `hold`.

    Returns:
        The cut, and what names all that was written. It is no checkpoint that the job could go back to.

    Raises:
        OperationFailed: nothing has changed, and the ranks have been told to go on.
    """
    async with _cut(job) as nodes:
        stand = await _stand(job, "move", nodes)
        _stopped(job, stand, check)
        checkpoint, _, _ = await _write(job, "leaving", nodes, stand, ranks)
        return stand.held, checkpoint


def _stopped(job: Job, stand: _Stand, check: Callable[[list[RankState]], None]) -> None:
    ranks = [rank for result in stand.finished for rank in result.ranks]
    check(ranks)
    if (step := lowest_step(ranks, job.spec.pack)) is not None:
        job.stopped_at(step)


@asynccontextmanager
async def _cut(job: Job) -> AsyncGenerator[tuple[NodeId, ...]]:
    """The next cut of the job on its nodes; whatever goes wrong inside, the ranks go on."""
    placement = job.state.placement
    if placement is None:
        raise OperationFailed("The job is on no node.", code="job.not-placed")
    if why := parts.over(job):
        raise OperationFailed(f"The job is ending, so that no cut is taken: {why}", code="job.ending")
    job.state.cut += 1
    cut, nodes = job.state.cut, placement.nodes
    try:
        yield nodes
    except Exception as error:
        # Not only an OperationFailed: whatever it was, no rank may be left standing.
        await resume(job, nodes, cut)
        if isinstance(error, OperationFailed):
            raise
        raise OperationFailed(f"The cut could not be taken: {error}", code="job.cut") from error


async def _stand(job: Job, what: str, nodes: tuple[NodeId, ...]) -> _Stand:
    """All ranks at the same cut, with its collectives done."""
    state, policy, cut = job.state, job.spec.checkpoint, job.state.cut
    prefer_s = policy.step_deadline_s if policy.cut == "step" else 0.0
    moot = _over(job)
    limit_s = STOP_S + prefer_s

    async def stop(node: NodeId, at: Step | None = None) -> BarrierResult:
        wait_s = prefer_s if at is None else min(prefer_s, CATCH_UP_S)
        request = BarrierInput(state.job, state.epoch, cut, "stop", limit_s, at_step=at, prefer_step_s=wait_s)
        story = f"cut {cut}: hold {node.name}"
        while True:
            try:
                return await on_node(
                    job, Activity.BARRIER, node, request, BarrierResult, story=story, limit_s=limit_s + 15, moot=moot
                )
            except OperationFailed as error:
                if not _not_yet(job, error):
                    raise
            await workflow.sleep(timedelta(seconds=1), summary=f"until the part on {node.name} runs")

    async def finish(node: NodeId, goals: tuple[CollectiveTarget, ...]) -> BarrierResult:
        request = BarrierInput(state.job, state.epoch, cut, "finish", STOP_S, targets=goals)
        story = f"cut {cut}: finish collectives on {node.name}"
        return await on_node(
            job, Activity.BARRIER, node, request, BarrierResult, story=story, limit_s=STOP_S + 15, moot=moot
        )

    job.operation = f"{what}: barrier"
    if prefer_s > 0 and len(nodes) > 1:
        # Were all asked at once, each would wait for the end of the step that its own foremost rank is in: one that is
        # a step ahead would wait in vain for a peer that stands already.
        leader = await stop(nodes[0])
        stopped_at = workflow.now()
        at = max((rank.step for rank in leader.ranks), default=Step(0))
        stood = [leader, *await each(nodes[1:], lambda node: stop(node, at))]
    else:
        stood = await each(nodes, stop)
        stopped_at = workflow.now()
    clock = Clock()
    goals = targets(rank for result in stood for rank in result.ranks)
    finished = await each(nodes, lambda node: finish(node, goals))
    clock.lap("barrier")
    return _Stand(HeldCut(cut, stopped_at, clock), finished)


async def _take(job: Job, kind: Literal["live", "full"], nodes: tuple[NodeId, ...], began: datetime) -> CutResult:
    stand = await _stand(job, f"{kind} checkpoint", nodes)
    stopped_at, clock = stand.held.stopped_at, stand.held.clock
    checkpoint, written, whole = await _write(job, kind, nodes, stand)
    _learn(job, whole, written)
    live_ms = _live_stop_ms(written)
    view = CheckpointView(
        id=checkpoint,
        kind=kind,
        time=workflow.now(),
        step=lowest_step((rank for node in whole for rank in node.states), job.spec.pack) or job.state.step,
        stored_bytes=sum(result.stored_bytes for result in written),
        total_bytes=sum(result.total_bytes for result in written),
        stopped_ms=live_ms if kind == "live" and live_ms is not None else _ms(stopped_at, workflow.now()),
    )
    job.committed(view, _ms(began, workflow.now()))
    return CutResult(view, stopped_at, clock.parts_ms)


async def _write(
    job: Job,
    kind: _Kind,
    nodes: tuple[NodeId, ...],
    stand: _Stand,
    leave: Mapping[NodeId, tuple[int, ...]] | None = None,
) -> tuple[CheckpointId, list[CheckpointResult], tuple[NodeParts, ...]]:
    """What stands is written on all nodes, and named; the checkpoint, and of each node what it has written."""
    state, cut, clock, moot = job.state, stand.held.number, stand.held.clock, _over(job)
    placement = state.placement
    assert placement is not None

    async def write(node: NodeId) -> CheckpointResult:
        ranks = (leave or {}).get(node, ())
        request = CheckpointInput(state.job, state.epoch, cut, kind, WRITE_S, parent=state.checkpoint, ranks=ranks)
        what = f"{kind} checkpoint" if leave is None else f"{counted(len(ranks), 'leaving rank')}"
        story = f"cut {cut}: write {what} on {node.name}"
        return await on_node(
            job, Activity.CHECKPOINT, node, request, CheckpointResult, story=story, limit_s=WRITE_S, moot=moot
        )

    job.operation = f"{kind} checkpoint: write"
    written = await each(nodes, write)
    clock.lap("write")
    for name, value in slowest([*(r.timings_ms for r in stand.finished), *(r.timings_ms for r in written)]).items():
        clock.parts_ms[f"node.{name}"] = value
    if moot is not None and moot():
        raise OperationFailed(f"Nothing is committed. {parts.moot(job)}", code="job.over")
    job.operation = f"{kind} checkpoint: commit"
    whole = tuple(result.parts for result in written if result.parts is not None)
    commit = await _commit(job, first_node(placement), cut, kind, whole)
    clock.lap("commit")
    if commit.checkpoint is None:
        raise OperationFailed("The commit named no checkpoint.", code="job.commit")
    return commit.checkpoint, written, whole


def _learn(job: Job, whole: tuple[NodeParts, ...], written: list[CheckpointResult]) -> None:
    """Keeps what the cut has found of which ranks may share a device, and how much that takes."""
    states = [state for parts in whole for state in parts.states]
    if len(states) != job.spec.world_size:
        return
    first = job.state.parallelism is None
    job.state.parallelism = parallelism(states)
    job.state.memory_bytes = min((result.memory_bytes for result in written), default=0)
    job.dirty = job.dirty or (first and job.spec.world_size > 1 and workflow.patched("widths"))


async def final(job: Job, nodes: tuple[NodeId, ...]) -> str:
    """Keeps the job directory as it is at the end, of nodes whose ranks have ended.

    A store or a node that does not answer is asked again: the directory is what the job was run for. A person who
    cancels the job meanwhile does not throw it away, but it is not tried again.

    Returns:
        Why it could not be kept; empty where it was.

    Raises:
        OperationFailed: `Interrupted`, `Fenced`; or what the ranks have left is gone (`gone` tells), so that the job
            has to go back to its newest checkpoint.
    """
    if not nodes or job.state.placement is None:
        return "no node is left that has it"
    until, patient = workflow.now() + KEEPING, workflow.patched("late-cancel")
    while True:
        try:
            return await _final(job, nodes, patient)
        except OperationFailed as error:
            if isinstance(error, Interrupted | Fenced) or gone(error):
                raise
            if patient and job.cancel:
                job.unkept = error.message
                raise Interrupted(job.cancel) from error
            if error.code in (RuntimeCode.DAMAGED, RuntimeCode.UNSUITABLE) or workflow.now() >= until:
                return error.message
            job.note("directory not kept yet", error.message)
        await workflow.sleep(timedelta(seconds=5), summary="until the job directory can be kept")


def gone(error: OperationFailed) -> bool:
    """Whether a node has nothing of the job any more: it is lost, or the part's processes were killed."""
    return isinstance(error, NodeLost) or error.code == RuntimeCode.UNKNOWN


async def _final(job: Job, nodes: tuple[NodeId, ...], patient: bool) -> str:
    assert job.state.placement is not None

    async def write(node: NodeId) -> CheckpointResult:
        request = CheckpointInput(job.state.job, job.state.epoch, 0, "final", WRITE_S)
        story = f"keep the job directory of {node.name}"
        return await on_node(
            job,
            Activity.CHECKPOINT,
            node,
            request,
            CheckpointResult,
            story=story,
            limit_s=WRITE_S,
            attempts=5,
            patient=patient,
        )

    written = await each(nodes, write)
    whole = tuple(result.parts for result in written if result.parts is not None)
    first = first_node(job.state.placement)
    commit = await _commit(job, first if first in nodes else nodes[0], 0, "final", whole, patient=patient)
    if commit.checkpoint is None:
        return "the commit named no checkpoint"
    job.committed(
        CheckpointView(
            id=commit.checkpoint,
            kind="final",
            time=workflow.now(),
            step=job.state.step,
            stored_bytes=sum(result.stored_bytes for result in written),
            total_bytes=sum(result.total_bytes for result in written),
            stopped_ms=0.0,
        ),
        0.0,
    )
    return ""


async def resume(job: Job, nodes: tuple[NodeId, ...], cut: int) -> None:
    """Lets the ranks go on, or finds that they do: a node does so by itself when nobody tells it anything."""

    async def go_on(node: NodeId) -> BarrierResult:
        request = BarrierInput(job.state.job, job.state.epoch, cut, "resume", RESUME_S)
        story = f"cut {cut}: let {node.name} run on"
        return await on_node(
            job, Activity.BARRIER, node, request, BarrierResult, story=story, limit_s=RESUME_S + 5, urgent=True
        )

    for node, answer in zip(nodes, await every(nodes, go_on), strict=True):
        if isinstance(answer, OperationFailed):
            workflow.logger.warning("job %s: resume on %s: %s", job.state.job, node, answer.message)


async def _commit(
    job: Job,
    node: NodeId,
    cut: int,
    kind: _Kind,
    whole: tuple[NodeParts, ...],
    *,
    patient: bool = False,
) -> CheckpointResult:
    request = CheckpointInput(
        job.state.job, job.state.epoch, cut, kind, COMMIT_S, commit=whole, parent=job.state.checkpoint
    )
    story = f"commit checkpoint on {node.name}" if kind != "final" else f"commit the job directory on {node.name}"
    return await on_node(
        job, Activity.CHECKPOINT, node, request, CheckpointResult, story=story, limit_s=COMMIT_S, patient=patient
    )


def completed_nodes(job: Job) -> tuple[NodeId, ...]:
    """Nodes whose ranks have all ended by themselves."""
    done = (*parts.ended(job, Outcome.COMPLETED), *parts.ended(job, Outcome.FAILED))
    return tuple(part.node for part in done)


def _over(job: Job) -> Callable[[], str] | None:
    """What tells that a cut has no purpose any more."""
    return (lambda: parts.over(job)) if workflow.patched("cut-of-living") else None


def _not_yet(job: Job, error: OperationFailed) -> bool:
    """Whether a node refuses a cut only because its part does not run yet."""
    if parts.over(job):
        return False
    if error.code == RuntimeCode.STARTING:
        return True  # it ends by itself: the part runs, or fails and is over
    # What has just been placed is known to its node as soon as that has picked `attend` up.
    since = job.attended_at
    return error.code == RuntimeCode.UNKNOWN and since is not None and workflow.now() - since < BEGINNING


def _live_stop_ms(written: list[CheckpointResult]) -> float | None:
    """How long the ranks stood for a live checkpoint, as the nodes measured it."""
    stood = [result.timings_ms["stopped"] for result in written if "stopped" in result.timings_ms]
    return max(stood) if stood else None


def _ms(since: datetime, until: datetime) -> float:
    return (until - since).total_seconds() * 1000
