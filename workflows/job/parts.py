"""The job's parts on its nodes: attended until they end, and ended when the job must not be there any more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Literal

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, CancelledError

from model.ids import Epoch, NodeId
from model.names import Activity, node_task_queue
from model.placement import Placement
from model.runtime import FINAL_CODES, AttendInput, AttendResult, Outcome, RankExit, RuntimeCode, StopInput, StopResult
from model.sharing import SharingNotice
from model.units import counted
from workflows.job import sharing
from workflows.job.calls import FOREVER, HEARTBEAT_S, every, on_node
from workflows.job.core import Job, Part
from workflows.job.errors import NodeLost, OperationFailed, of_activity

STOP_PATIENCE = timedelta(seconds=120)
"""How long a node that neither stops nor is lost is asked: its lease is long over then, the next epoch fences it."""


def attend(job: Job, start: Literal["fresh", "restored"]) -> None:
    """Begins to attend the parts of the current epoch; they are in `job.parts` from now on."""
    placement = job.state.placement
    if placement is None:
        return
    job.parts = {node: Part(node, placement.epoch) for node in placement.nodes}
    job.attended_at = workflow.now()
    for part in job.parts.values():
        request = AttendInput(job.state.job, placement.epoch, part.node, job.spec, placement, start)
        story = f"epoch {placement.epoch}: {_ranks(job, placement, part.node)} on {part.node.name}"
        part.task = asyncio.create_task(_attend(job, part, request, story))
        job.leftover.add(part.task)
        part.task.add_done_callback(job.leftover.discard)


def _ranks(job: Job, placement: Placement, node: NodeId) -> str:
    if job.spec.pack == "node":
        return "a script that starts its own ranks"
    return counted(len(placement.ranks_at(node)), "rank")


async def _attend(job: Job, part: Part, request: AttendInput, story: str) -> None:
    # Without a limit on its queue: an agent that starts again goes on with it, and a dead one's is let go when the
    # scheduler gives the node up.
    handle = workflow.start_activity(
        Activity.ATTEND.value,
        request,
        result_type=AttendResult,
        task_queue=node_task_queue(part.node),
        start_to_close_timeout=FOREVER,
        heartbeat_timeout=timedelta(seconds=HEARTBEAT_S),
        retry_policy=RetryPolicy(
            initial_interval=timedelta(milliseconds=200),
            maximum_interval=timedelta(seconds=5),
            non_retryable_error_types=FINAL_CODES,
        ),
        summary=story,
    )
    await workflow.wait_condition(lambda: handle.done() or job.is_lost(part.node))
    if not handle.done():
        handle.cancel()
    try:
        part.result = result = await handle
        if (told := result.progress.sharing) is not None and not job.state.phase.ended:
            sharing.noticed(job, SharingNotice(part.epoch, part.node, told))
    except ActivityError as error:
        if job.is_lost(part.node):
            part.error = NodeLost(part.node)
        elif isinstance(error.cause, CancelledError):
            part.error = OperationFailed(f"Node {part.node.name} no longer attends the job.", code="job.let-go")
        else:
            part.error = of_activity(error, f"Node {part.node.name}")
    except asyncio.CancelledError:
        part.error = OperationFailed("The part is not attended any more.", code="job.let-go")
        raise


def trouble(job: Job) -> OperationFailed | None:
    """Why the job cannot go on where it is, by what its parts and the scheduler say; None where it can."""
    for node in job.nodes:
        if job.is_lost(node):
            return NodeLost(node)
    return _cut_short(job)


def _cut_short(job: Job) -> OperationFailed | None:
    for part in job.parts.values():
        if part.error is not None:
            return part.error
    for part in job.parts.values():
        if part.result is not None and part.result.outcome in (Outcome.LOST, Outcome.STOPPED):
            how = "lost a process" if part.result.outcome is Outcome.LOST else "was stopped by somebody else"
            return OperationFailed(f"The job {how} on node {part.node.name}.", code=f"job.{part.result.outcome}")
    return None


def ended(job: Job, outcome: Outcome) -> tuple[Part, ...]:
    """The parts that have ended in this way."""
    return tuple(part for part in job.parts.values() if part.result is not None and part.result.outcome is outcome)


def over(job: Job) -> str:
    """Why the job does not run on as it did: how a part of it ended, or that it could not be attended; else empty."""
    if found := _cut_short(job):
        return found.message
    if failed := ended(job, Outcome.FAILED):
        code, _ = failure_of(job, failed)
        who = next((f"rank {end.rank}" for end in _failures(failed)), "a rank")
        return f"{'its command' if job.spec.pack == 'node' else who} exited with {code}."
    done = ended(job, Outcome.COMPLETED)
    return f"its ranks on {', '.join(part.node.name for part in done)} have ended." if done else ""


def moot(job: Job) -> str:
    """Why what is made ready for the job has no purpose any more: it is lost where it is, or has ended; else empty."""
    if found := _cut_short(job):
        return found.message
    why = over(job)
    return f"The job has ended meanwhile: {why}" if why else ""


async def end_epoch(job: Job, reason: str, *, grace_s: float = 0.0) -> None:
    """Ends what the job has on its nodes; one that has not answered is asked again before the next epoch begins."""
    state = job.state
    state.unstopped = await stop_all(job, (*job.nodes, *state.unstopped), state.epoch, reason, grace_s=grace_s)
    state.stopped_epoch = state.epoch


async def stop_all(
    job: Job,
    nodes: Sequence[NodeId],
    epoch: Epoch,
    reason: str,
    *,
    grace_s: float = 0.0,
    patience: timedelta = STOP_PATIENCE,
    only: tuple[NodeId, ...] = (),
) -> tuple[NodeId, ...]:
    """Ends what these nodes have of the job up to `epoch`: answered by each, or it is lost, or patience is over.

    On the nodes `only` the epochs before go on.

    It never gives way: what it begins has to be over before the job goes on.

    Returns:
        The nodes that have not answered and are not lost.
    """

    async def stop(node: NodeId) -> bool:
        deadline = workflow.now() + patience
        while not job.is_lost(node):
            try:
                await on_node(
                    job,
                    Activity.STOP,
                    node,
                    StopInput(job.state.job, epoch, reason[:500], grace_s, only=node in only),
                    StopResult,
                    story=f"stop on {node.name}: {reason}"[:200],
                    limit_s=grace_s + 60,
                    urgent=True,
                )
                return True
            except OperationFailed as error:
                # FENCED: a higher epoch is on the node, which has ended ours already.
                if error.code == RuntimeCode.FENCED or isinstance(error, NodeLost):
                    return True
                workflow.logger.warning("job %s: stop on %s: %s", job.state.job, node, error.message)
                if workflow.now() >= deadline:
                    return False
                await workflow.sleep(timedelta(seconds=2), summary=f"until {node.name} answers or is lost")
        return True

    asked = tuple(dict.fromkeys(nodes))
    answers = await every(asked, stop)
    return tuple(node for node, answer in zip(asked, answers, strict=True) if answer is not True)


def failure_of(job: Job, parts: Sequence[Part]) -> tuple[int, str]:
    """Exit code and last words of the first rank that failed, or of the command that has started the ranks."""
    for end in _failures(parts):
        who = "The command" if job.spec.pack == "node" else f"Rank {end.rank}"
        return end.exit_code or 1, f"{who} exited with {end.exit_code}. {end.last_words}".strip()
    return 1, "A rank failed."


def _failures(parts: Sequence[Part]) -> Iterator[RankExit]:
    for part in parts:
        if part.result is not None:
            yield from (end for end in part.result.exits if end.exit_code not in (None, 0))
