"""Control activities of a job: its record in the fleet's store, and its events to Kafka."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

import structlog
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from events.envelope import from_json
from events.types import Event
from model.control import (
    AdvanceHeadInput,
    AdvanceHeadResult,
    AllocateEpochInput,
    AllocateEpochResult,
    AwaitJobsInput,
    AwaitJobsResult,
    OpenJobInput,
    OpenJobResult,
    PublishInput,
    PublishResult,
)
from model.errors import ModelError
from model.ids import Generation, JobId
from model.names import Activity
from model.runtime import RuntimeCode
from proxy_runtime.errors import ErgoError

T = TypeVar("T")

LOOK = timedelta(seconds=2)
"""Between two looks at a job that another one waits for."""

_log = structlog.stdlib.get_logger(__name__)


class JobRecords(Protocol):
    """A job's record by compare-and-swap; `proxy_runtime.storage.fleet.FleetStore` is one."""

    def open_job(self, input: OpenJobInput) -> OpenJobResult:
        """Takes the record for a run of the workflow."""
        ...

    def allocate_epoch(self, input: AllocateEpochInput) -> AllocateEpochResult:
        """Hands out an epoch that nobody has had."""
        ...

    def advance_head(self, input: AdvanceHeadInput) -> AdvanceHeadResult:
        """Makes an epoch the one that counts."""
        ...

    def holds_generation(self, job: JobId, workflow_run: str, generation: Generation) -> bool:
        """Whether a run may publish."""
        ...


class EventSink(Protocol):
    """Where events go; `events.producer.EventProducer` is one."""

    def publish(self, events: Sequence[Event]) -> int:
        """Blocks until all are acknowledged; may be repeated."""
        ...


class Fates(Protocol):
    """Asks what has become of a job; `activities.fates.TemporalFates` is one."""

    async def ask(self, job: JobId) -> str | None:
        """How its workflow has closed, such as ``completed``; None while it goes on or nobody knows."""
        ...


class JobActivities:
    """The activities on `JOB_TASK_QUEUE`.

    Args:
        records: the fleet's store.
        sink: where events go.
        cluster: whose scheduler places the jobs of this worker.
        fates: tells of other jobs, for those that come `after` them.
        search_attributes: which of `model.names.SearchAttribute` the server knows, with the right types.
    """

    def __init__(
        self,
        records: JobRecords,
        sink: EventSink,
        *,
        cluster: str,
        fates: Fates | None = None,
        search_attributes: Callable[[], tuple[str, ...]] = lambda: (),
    ) -> None:
        self._fates = fates
        self._records = records
        self._sink = sink
        self._cluster = cluster
        self._search_attributes = search_attributes

    @property
    def all(self) -> tuple[Callable[..., object], ...]:
        """What a worker registers."""
        return (self.open_job, self.allocate_epoch, self.advance_head, self.publish_events, self.await_jobs, self.turn)

    @activity.defn(name=Activity.OPEN_JOB)
    def open_job(self, request: OpenJobInput) -> OpenJobResult:
        """Takes the job's record for this run of its workflow, and says what counts."""
        result = _call(request.job, lambda: self._records.open_job(request))
        return dataclasses.replace(result, cluster=self._cluster, search_attributes=self._search_attributes())

    @activity.defn(name=Activity.ALLOCATE_EPOCH)
    def allocate_epoch(self, request: AllocateEpochInput) -> AllocateEpochResult:
        """Hands out an epoch."""
        return _call(request.job, lambda: self._records.allocate_epoch(request))

    @activity.defn(name=Activity.ADVANCE_HEAD)
    def advance_head(self, request: AdvanceHeadInput) -> AdvanceHeadResult:
        """Makes an epoch the one that counts: lower ones are fenced from then on."""
        return _call(request.job, lambda: self._records.advance_head(request))

    @activity.defn(name=Activity.PUBLISH)
    def publish_events(self, request: PublishInput) -> PublishResult:
        """Publishes events in order. Repeated, it sends the same ids again, which readers drop."""

        def publish() -> PublishResult:
            if not self._records.holds_generation(request.job, request.workflow_run, request.generation):
                raise ApplicationError(
                    f"Run {request.workflow_run} no longer holds generation {request.generation} of {request.job}.",
                    type=RuntimeCode.FENCED.value,
                    non_retryable=True,
                )
            self._sink.publish([from_json(document) for document in request.events])
            return PublishResult(len(request.events))

        return _call(request.job, publish)

    @activity.defn(name=Activity.AWAIT_JOBS)
    async def await_jobs(self, request: AwaitJobsInput) -> AwaitJobsResult:
        """Looks whether other jobs have ended, and is tried again until they have.

        Who waits takes no place of the worker meanwhile: as many as it has would keep it from all else.
        """
        if self._fates is None:
            raise ApplicationError("This worker cannot ask for other jobs.", type="job.no-fates")
        for other, wanted in request.after:
            how = await self._fates.ask(other)
            if how is None:
                raise ApplicationError(
                    f"Job {other} goes on.",
                    type="job.waits",
                    next_retry_delay=LOOK,
                    category=ApplicationErrorCategory.BENIGN,
                )
            if wanted == "completed" and how != "completed":
                return AwaitJobsResult(f"Job {other} was to be completed first (`after`), but is {how}.")
        return AwaitJobsResult()

    @activity.defn(name=Activity.TURN)
    async def turn(self) -> None:
        """Nothing: that it is over begins the workflow's next task, in which an update has its turn."""


def _call(job: JobId, call: Callable[[], T]) -> T:
    info = activity.info()
    with structlog.contextvars.bound_contextvars(job=str(job), workflow_run=info.workflow_run_id):
        try:
            result = call()
        except (ErgoError, ModelError) as error:
            _log.warning("activity failed", activity=info.activity_type, code=error.code, error=str(error))
            fenced = error.code == RuntimeCode.FENCED
            raise ApplicationError(str(error), type=str(error.code), non_retryable=fenced) from error
        _log.info("activity done", activity=info.activity_type, attempt=info.attempt)
        return result
