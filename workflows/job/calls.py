"""Calls of activities from a job's operations: with time limits, retries, and a story for the timeline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError

from model.ids import NodeId
from model.names import JOB_TASK_QUEUE, Activity, node_task_queue
from model.runtime import FINAL_CODES, RuntimeCode
from workflows.job.core import Job
from workflows.job.errors import Interrupted, NodeLost, OperationFailed, of_activity

T = TypeVar("T")

NODE_QUEUE_S = 20.0
"""How long a live node may take to pick a call up; an agent that starts again needs a few seconds."""

HEARTBEAT_S = 10.0
"""Agents beat every second."""

FOREVER = timedelta(days=3650)

_CONTROL_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=200),
    maximum_interval=timedelta(seconds=10),
    non_retryable_error_types=[RuntimeCode.FENCED.value],
)


async def on_node(
    job: Job,
    activity: Activity,
    node: NodeId,
    request: object,
    result: type[T],
    *,
    story: str,
    limit_s: float,
    attempts: int = 3,
    urgent: bool = False,
    patient: bool = False,
    moot: Callable[[], str] | None = None,
) -> T:
    """Calls a node.

    Args:
        job: the job.
        activity: of the node.
        node: it is not waited for once the scheduler has given it up.
        request: input of the activity.
        result: type of its result.
        story: what the timeline of the UI says.
        limit_s: seconds for one attempt.
        attempts: how many.
        urgent: goes on even where the operation should give way: it puts something back in order.
        patient: gives way only where the record has to be opened again, not to a cancellation.
        moot: says in a sentence why the operation has no purpose any more, the job not running on; else empty.

    Raises:
        OperationFailed: `NodeLost`, `Interrupted`, `Fenced`, or another.
    """
    if job.is_lost(node):
        raise NodeLost(node)
    handle: asyncio.Task[T] = workflow.start_activity(
        activity.value,
        request,
        result_type=result,
        task_queue=node_task_queue(node),
        schedule_to_start_timeout=timedelta(seconds=NODE_QUEUE_S),
        start_to_close_timeout=timedelta(seconds=limit_s),
        heartbeat_timeout=timedelta(seconds=HEARTBEAT_S),
        retry_policy=RetryPolicy(
            initial_interval=timedelta(milliseconds=500),
            maximum_interval=timedelta(seconds=5),
            maximum_attempts=attempts,
            non_retryable_error_types=FINAL_CODES,
        ),
        summary=story,
    )
    where, yields = f"Node {node.name}, {activity.value}", _only_to_reopening(job) if patient else None
    return await _outcome(job, handle, where, node=node, urgent=urgent, gives_way=yields, moot=moot)


async def control(
    job: Job,
    activity: Activity,
    request: object,
    result: type[T],
    *,
    story: str,
    limit_s: float | None = None,
    patient: bool = False,
    heard_out: bool = False,
) -> T:
    """Calls a control activity; it is tried until it is answered.

    Args:
        job: the job.
        activity: of the job's control.
        request: input of the activity.
        result: type of its result.
        story: what the timeline of the UI says.
        limit_s: seconds for all attempts; None for ever.
        patient: gives way only where the record has to be opened again, not to a cancellation.
        heard_out: where it gives way, it waits for what becomes of the call that is under way.

    Raises:
        OperationFailed: `Interrupted`, `Fenced`, or time is over.
    """
    cancelling = workflow.ActivityCancellationType
    handle: asyncio.Task[T] = workflow.start_activity(
        activity.value,
        request,
        result_type=result,
        task_queue=JOB_TASK_QUEUE,
        start_to_close_timeout=timedelta(seconds=30),
        schedule_to_close_timeout=FOREVER if limit_s is None else timedelta(seconds=limit_s),
        retry_policy=_CONTROL_RETRY,
        cancellation_type=cancelling.WAIT_CANCELLATION_COMPLETED if heard_out else cancelling.TRY_CANCEL,
        summary=story,
    )
    where = f"Control activity {activity.value}"
    if patient:
        return await _outcome(job, handle, where, gives_way=_only_to_reopening(job))
    # What opens the record is how an interruption ends: it waits for its answer.
    return await _outcome(job, handle, where, urgent=activity is Activity.OPEN_JOB)


async def told(activity: Activity, request: object, *, queue: str, story: str) -> None:
    """Tells somebody something, until it is known."""
    await workflow.execute_activity(
        activity.value,
        request,
        task_queue=queue,
        start_to_close_timeout=timedelta(seconds=30),
        retry_policy=RetryPolicy(initial_interval=timedelta(milliseconds=500), maximum_interval=timedelta(seconds=5)),
        summary=story,
    )


async def each(nodes: Sequence[NodeId], call: Callable[[NodeId], Awaitable[T]]) -> list[T]:
    """Calls all nodes at the same time; where one fails, the others are let go and the first failure is raised."""

    async def one(node: NodeId) -> T:
        return await call(node)

    tasks = [asyncio.create_task(one(node)) for node in nodes]
    try:
        return list(await asyncio.gather(*tasks))
    except (Exception, asyncio.CancelledError):
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def every(nodes: Sequence[NodeId], call: Callable[[NodeId], Awaitable[T]]) -> list[T | OperationFailed]:
    """Calls all nodes at the same time and waits for every answer, failures included."""

    async def one(node: NodeId) -> T | OperationFailed:
        try:
            return await call(node)
        except OperationFailed as error:
            return error

    return list(await asyncio.gather(*(one(node) for node in nodes)))


def _only_to_reopening(job: Job) -> Callable[[], bool]:
    return lambda: bool(job.reopen)


async def _outcome(
    job: Job,
    handle: asyncio.Task[T],
    where: str,
    *,
    node: NodeId | None = None,
    urgent: bool = False,
    gives_way: Callable[[], bool] | None = None,
    moot: Callable[[], str] | None = None,
) -> T:
    def given_up() -> bool:
        if (node is not None and job.is_lost(node)) or (moot is not None and moot() != ""):
            return True
        return gives_way() if gives_way is not None else job.interrupted and not urgent

    try:
        await workflow.wait_condition(lambda: handle.done() or given_up())
    except asyncio.CancelledError:
        await let_go(handle)
        raise
    if not handle.done():
        since = workflow.info().get_current_history_length()
        failure = await let_go(handle)
        if node is not None and job.is_lost(node):
            raise NodeLost(node)
        if moot is not None and (why := moot()) and not job.interrupted:
            raise OperationFailed(why, code="job.over")
        raise Interrupted(job.cancel or job.reopen, since, of_activity(failure, where) if failure else None)
    try:
        return handle.result()
    except ActivityError as error:
        raise of_activity(error, where) from error


async def let_go(handle: asyncio.Task[Any]) -> ActivityError | None:
    """Ends a call whose result nobody waits for any more; how it failed, where that is known."""
    handle.cancel()
    try:
        await handle
    except (Exception, asyncio.CancelledError) as error:
        return error if isinstance(error, ActivityError) else None
    return None
