"""Activities on a node: the six calls of `model.runtime`, on the task queue of this incarnation of the node.

All are synchronous and block in a thread of the worker, with a heartbeat every second, so that an agent that dies is
noticed in seconds. Cancellation never ends anything by itself: an activity lets go, and the ranks run on until `stop`.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory, CancelledError

from model.errors import ModelError
from model.ids import Epoch, JobId, Step
from model.names import Activity
from model.runtime import (
    FINAL_CODES,
    AttendInput,
    AttendResult,
    BarrierInput,
    BarrierResult,
    CheckpointInput,
    CheckpointResult,
    NodeRuntime,
    Progress,
    RestoreInput,
    RestoreResult,
    RuntimeCode,
    StopInput,
    StopResult,
    TransferInput,
    TransferResult,
)
from model.shape import Shape
from proxy_runtime.errors import ErgoError

T = TypeVar("T")

BEAT_S = 1.0

LET_GO = "node.let-go"
"""Code of an `attend` that ends because its agent does. Tried again, it re-attaches."""

_log = structlog.stdlib.get_logger(__name__)


class JobFates(Protocol):
    """Asks the workflow engine what has become of a job."""

    def closed(self, job: JobId) -> str | None:
        """How the job's workflow has closed, such as ``terminated``; None while it goes on or nobody knows."""
        ...


@dataclass(frozen=True, slots=True)
class PhaseProgress(Shape):
    """Heartbeat of a call that takes a while; `bytes` so far, where they are counted."""

    phase: str
    bytes: int = 0


class NodeActivities:
    """The activities of one node.

    Args:
        runtime: does the work.
        fates: tells of jobs whose workflow is gone.
        transferred: bytes that a transfer of a job has brought so far.
    """

    def __init__(
        self, runtime: NodeRuntime, fates: JobFates, transferred: Callable[[JobId, Epoch], int] = lambda _job, _epoch: 0
    ) -> None:
        self._runtime = runtime
        self._fates = fates
        self._transferred = transferred

    @property
    def all(self) -> tuple[Callable[..., object], ...]:
        """What a worker registers."""
        return (self.attend, self.barrier, self.checkpoint, self.transfer, self.restore, self.stop)

    @activity.defn(name=Activity.ATTEND, no_thread_cancel_exception=True)
    def attend(self, request: AttendInput) -> AttendResult:
        """Runs the node's part of a job until it ends; lets go, ranks untouched, when cancelled or shut down."""
        known = [Progress(Step(0), 0)]

        def report(progress: Progress) -> None:
            known[0] = progress
            if activity.is_cancelled() or activity.is_worker_shutdown():
                raise _LetGo

        try:
            return self._call(request, lambda: self._runtime.attend(request, report), lambda: known[0])
        except _LetGo:
            if not activity.is_cancelled():
                # Nobody has asked for it, so Temporal takes no cancellation; whoever comes next re-attaches at once.
                raise ApplicationError("The node agent ends; the ranks run on.", type=LET_GO) from None
            self._end_if_closed(request)
            raise CancelledError("The node has let go of the job; its ranks run on.") from None

    @activity.defn(name=Activity.BARRIER, no_thread_cancel_exception=True)
    def barrier(self, request: BarrierInput) -> BarrierResult:
        """Stops this node's part at a cut, finishes it, or resumes."""
        return self._call(request, lambda: self._runtime.barrier(request), _phase(f"barrier {request.phase}"))

    @activity.defn(name=Activity.CHECKPOINT, no_thread_cancel_exception=True)
    def checkpoint(self, request: CheckpointInput) -> CheckpointResult:
        """Writes the node's parts of a checkpoint, or commits it."""
        phase = _phase("write" if request.commit is None else "commit")
        return self._call(request, lambda: self._runtime.checkpoint(request), phase)

    @activity.defn(name=Activity.TRANSFER, no_thread_cancel_exception=True)
    def transfer(self, request: TransferInput) -> TransferResult:
        """Brings what is missing of a checkpoint to this node."""

        def beat() -> object:
            return PhaseProgress("transfer", self._transferred(request.job, request.epoch))

        return self._call(request, lambda: self._runtime.transfer(request), beat)

    @activity.defn(name=Activity.RESTORE, no_thread_cancel_exception=True)
    def restore(self, request: RestoreInput) -> RestoreResult:
        """Restores the node's part of a job, paused."""
        return self._call(request, lambda: self._runtime.restore(request), _phase("restore"))

    @activity.defn(name=Activity.STOP, no_thread_cancel_exception=True)
    def stop(self, request: StopInput) -> StopResult:
        """Ends the node's part of a job."""
        return self._call(request, lambda: self._runtime.stop(request), _phase("stop"))

    def _call(self, request: _Request, call: Callable[[], T], details: Callable[[], object]) -> T:
        info = activity.info()
        ids = {"job": str(request.job), "epoch": int(request.epoch), "workflow_run": info.workflow_run_id}
        with structlog.contextvars.bound_contextvars(**ids), _Heart(details):
            _log.info("activity began", activity=info.activity_type, attempt=info.attempt)
            try:
                result = call()
            except _LetGo:
                _log.info("let go", activity=info.activity_type)
                raise
            except (ErgoError, ModelError) as error:
                level = logging.INFO if error.code == RuntimeCode.STARTING else logging.WARNING
                _log.log(level, "activity failed", activity=info.activity_type, code=error.code, error=str(error))
                raise application_error(error) from error
            _log.info("activity done", activity=info.activity_type, result=_short(result))
            return result

    def _end_if_closed(self, request: AttendInput) -> None:
        """The server knows the activity no more: the job goes on as a new run, or it is over and its ranks must end."""
        details = activity.cancellation_details()
        if details is None or not details.not_found:
            return  # cancelled by the workflow, which stops the ranks by `stop`
        how = self._fates.closed(request.job)
        if how is not None:
            _log.warning("the workflow is closed; its ranks are ended", job=str(request.job), status=how)
            self._runtime.stop(StopInput(request.job, request.epoch, f"The job's workflow was {how}."))


class _Request(Protocol):
    @property
    def job(self) -> JobId: ...
    @property
    def epoch(self) -> Epoch: ...


class _LetGo(BaseException):
    """Raised through the runtime's `attend`. Not an Exception: nothing on the way may take it for an error."""


class _Heart:
    """Heartbeats of a blocking activity from a thread of its own, until it has ended."""

    def __init__(self, details: Callable[[], object]) -> None:
        self._details = details
        self._over = threading.Event()
        context = contextvars.copy_context()  # heartbeats find their activity by it
        self._thread = threading.Thread(target=context.run, args=(self._beat,), daemon=True, name="heartbeat")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        while True:
            activity.heartbeat(self._details())
            if self._over.wait(BEAT_S):
                return


def application_error(error: ErgoError | ModelError) -> ApplicationError:
    """What a workflow sees of an error: its code as type, its sentences; tried again only where that may help."""
    code = str(error.code)
    final = code in FINAL_CODES or isinstance(error, ModelError)
    # The SDK logs a failure with its traceback, unless it is called benign: this one is an answer like others.
    benign = ApplicationErrorCategory.BENIGN if code == RuntimeCode.STARTING else ApplicationErrorCategory.UNSPECIFIED
    return ApplicationError(str(error), type=code, non_retryable=final, category=benign)


def _phase(name: str) -> Callable[[], object]:
    return lambda: PhaseProgress(name)


def _short(result: object) -> str:
    text = repr(result)
    return text if len(text) <= 500 else f"{text[:497]}..."
