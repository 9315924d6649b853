"""Updates that came together are done one after the other, and each in a later task than the one that brings it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError

from model.codec import from_value
from model.errors import ModelError
from model.names import JOB_TASK_QUEUE, Activity
from workflows.job.errors import refusal

T = TypeVar("T")

_PATCH = "update-turn-2"
"""Before, a timer gave the turn (``update-turn``), and nobody waited for who had come earlier."""

_LIMIT = timedelta(seconds=1)
"""Where no worker is free for so long, the update goes on without."""

_OLD_TURN = timedelta(milliseconds=1)
"""Of histories of before."""


class Line:
    """The updates that wait for their turn, in the order in which they came."""

    def __init__(self) -> None:
        self._places: list[object] = []

    def accept(self, shape: type[T], request: Any, may: Callable[[T], None]) -> None:
        """Refuses what cannot be done, without a trace in the history.

        Where others wait for their turn, what holds after these is looked at in the update's own.

        Raises:
            ApplicationError: of `may`, or the request is none.
        """
        wanted = _read(shape, request)
        if not self._places:
            may(wanted)

    async def turn(self, shape: type[T], request: Any, may: Callable[[T], None]) -> T:
        """Lets all that is older than an update come before it; then looks again whether it may be done.

        A worker that has just taken the job over is given the update together with what the job's last task had
        brought, where that task ordered nothing, and the update first; replays give it after that, as older
        (temporalio/sdk-rust issue 1146). Two handlers and coroutines would then wake in another order, and the history
        fit no replay. So an update does nothing in the task that brings it. Where one task brings several, as a reset
        does, each finds the job as the one before has left it.

        Raises:
            ApplicationError: of `may`, where what it was accepted for has changed meanwhile.
        """
        place = object()
        self._places.append(place)
        try:
            if workflow.patched(_PATCH):
                await _in_a_later_task()
                await workflow.wait_condition(lambda: self._places[0] is place)
            elif workflow.patched("update-turn"):
                await workflow.sleep(_OLD_TURN, summary="the update's turn")
            else:
                return _read(shape, request)
            wanted = _read(shape, request)
            may(wanted)
            return wanted
        finally:
            self._places.remove(place)


async def _in_a_later_task() -> None:
    """Returns in a later task of the workflow, some milliseconds from now.

    An activity that does nothing is the fastest way there: the server lets the shortest timer fire up to a second late.
    A local activity would be faster, but those of one task that end in another order than they began in do not fit
    their replay (temporalio/sdk-python issue 1578). What became of it does not matter, and neither does a worker of an
    older build, which does not know it.
    """
    with contextlib.suppress(ActivityError):
        await workflow.execute_activity(
            Activity.TURN.value,
            task_queue=JOB_TASK_QUEUE,
            schedule_to_close_timeout=_LIMIT,
            retry_policy=RetryPolicy(maximum_attempts=1),
            summary="the update's turn",
        )


def _read(shape: type[T], request: Any) -> T:
    """An update's argument; what is wrong with it is said in a sentence, where the SDK would only say that it is."""
    try:
        return from_value(shape, {} if request is None else request)
    except ModelError as error:
        raise refusal(str(error), error.code) from error
