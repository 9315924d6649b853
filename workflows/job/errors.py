"""Why an operation on a job did not go through. None of these leaves the workflow: its driver handles each."""

from __future__ import annotations

from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.exceptions import TimeoutError as TimedOut

from model.ids import NodeId
from model.runtime import RuntimeCode

_TIMEOUTS = {
    "heartbeat": "its agent is gone or hangs; `ergo fleet` tells whether the node is there",
    "schedule-to-start": "no agent took it up; `ergo fleet` tells whether the node is there",
    "start-to-close": "it took longer than it may; the agent's log tells what it was at",
    "schedule-to-close": "it was tried until time was over; the log of who should have answered tells more",
}


class OperationFailed(Exception):
    """A step of an operation failed.

    Attributes:
        code: the activity's error code, or ``job.…``.
    """

    def __init__(self, message: str, *, code: str = "job.failed-step") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class Fenced(OperationFailed):
    """Another run of the workflow, or a higher epoch, has the job: what this run believes is out of date."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=RuntimeCode.FENCED)


class NodeLost(OperationFailed):
    """The scheduler has given the node up."""

    def __init__(self, node: NodeId) -> None:
        super().__init__(f"Node {node} is lost.", code="job.node-lost")
        self.node = node


class Interrupted(OperationFailed):
    """Something more urgent came: the job is cancelled, or its workflow was reset.

    Attributes:
        since: length of the workflow's history when that was heard of.
        failure: how the call that was given up has failed, where that is known.
    """

    def __init__(self, message: str, since: int = 0, failure: OperationFailed | None = None) -> None:
        super().__init__(message, code="job.interrupted")
        self.since, self.failure = since, failure


def of_activity(error: ActivityError, where: str) -> OperationFailed:
    """Says in a sentence what an activity's error means."""
    cause = error.cause
    if isinstance(cause, ApplicationError):
        code = cause.type or "job.failed-step"
        message = cause.message or str(cause)
        if code == RuntimeCode.FENCED:
            return Fenced(message)
        return OperationFailed(f"{where}: {message}", code=code)
    if isinstance(cause, TimedOut):
        kind = cause.type.name.lower().replace("_", "-") if cause.type is not None else "time"
        return OperationFailed(
            f"{where} did not answer in time: {_TIMEOUTS.get(kind, kind)}.", code=f"job.timeout.{kind}"
        )
    return OperationFailed(f"{where}: {cause or error}", code="job.failed-step")


def refusal(sentence: str, code: str = "job.refused") -> ApplicationError:
    """What an update that cannot be done is answered with."""
    return ApplicationError(sentence, type=code, non_retryable=True)
