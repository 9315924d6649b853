"""The worker of jobs: their workflows, and the activities on the fleet's store and Kafka that these ask for.

    python -m infra.job_worker

Any number of them may run; each may be killed at any moment.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import stamina
import structlog

from activities.fates import TemporalFates
from activities.job import JobActivities
from events.producer import EventProducer
from infra.settings import Settings
from infra.temporal import SEARCH_ATTRIBUTES
from infra.working import run, until_over
from model.names import JOB_TASK_QUEUE

if TYPE_CHECKING:
    from temporalio.client import Client
    from temporalio.worker import Worker, WorkflowRunner

_THREADS = 32
_LOOK_S = 30.0

_log = structlog.stdlib.get_logger(__name__)


def workflow_runner() -> WorkflowRunner:
    """The sandbox of our workflows: only what decides is loaded anew for each run, shapes are shared with the worker.

    A shape that were loaded anew would be another type in each run, and its validator would be kept for ever.
    """
    from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

    shared = ("model", "events", "scheduling", "pydantic", "pydantic_core", "annotated_types", "orjson")
    return SandboxedWorkflowRunner(SandboxRestrictions.default.with_passthrough_modules(*shared, "workflows.job.state"))


class RegisteredAttributes:
    """Which of our search attributes the server knows with the right type; looked at again while some are missing."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: tuple[str, ...] = ()

    def __call__(self) -> tuple[str, ...]:
        """Their names, as they were seen last."""
        return self._known

    async def look(self) -> None:
        """Asks the server once; what it does not answer is not used."""
        from temporalio.api.enums.v1 import IndexedValueType
        from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
        from temporalio.service import RPCError

        kinds = {
            "Keyword": IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
            "Int": IndexedValueType.INDEXED_VALUE_TYPE_INT,
            "KeywordList": IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD_LIST,
        }
        try:
            found = await self._client.operator_service.list_search_attributes(
                ListSearchAttributesRequest(namespace=self._client.namespace), timeout=timedelta(seconds=10)
            )
        except RPCError as error:
            _log.warning("search attributes are not used: the server does not tell them", error=error.message)
            return
        custom = found.custom_attributes
        self._known = tuple(
            name.value for name, kind in SEARCH_ATTRIBUTES.items() if custom.get(name.value) == kinds[kind]
        )

    async def watch(self) -> None:
        """Looks until all are known."""
        await self.look()
        while len(self._known) < len(SEARCH_ATTRIBUTES):
            _log.warning("search attributes are missing on the server", known=self._known)
            await asyncio.sleep(_LOOK_S)
            await self.look()


def job_worker(client: Client, activities: JobActivities, executor: ThreadPoolExecutor) -> Worker:
    """A worker for workflows and control activities of jobs."""
    from temporalio.worker import Worker

    from workflows.job import JobWorkflow

    return Worker(
        client,
        task_queue=JOB_TASK_QUEUE,
        workflows=[JobWorkflow],
        activities=activities.all,
        activity_executor=executor,
        max_concurrent_activities=_THREADS,
        workflow_runner=workflow_runner(),
        graceful_shutdown_timeout=timedelta(seconds=5),
    )


async def work(settings: Settings, over: asyncio.Event) -> None:
    """Works until `over`; connects again whenever the worker fails."""
    fleet = settings.fleet_store()
    producer = EventProducer(settings.kafka(), client_id="job-worker")
    try:
        async for attempt in stamina.retry_context(on=Exception, attempts=None, timeout=None, wait_max=5.0):
            with attempt:
                client = await settings.connect_temporal(identity="job-worker")
                registered = RegisteredAttributes(client)
                await registered.look()
                activities = JobActivities(
                    fleet,
                    producer,
                    cluster=settings.cluster,
                    fates=TemporalFates(client),
                    search_attributes=registered,
                )
                watching = asyncio.create_task(registered.watch())
                try:
                    with ThreadPoolExecutor(_THREADS, thread_name_prefix="activity") as executor:
                        worker = job_worker(client, activities, executor)
                        _log.info("works", queue=JOB_TASK_QUEUE, cluster=settings.cluster)
                        await until_over(over, worker)
                finally:
                    watching.cancel()
    finally:
        producer.close()


def main() -> int:
    """Entry point."""
    return run("job-worker", work)


if __name__ == "__main__":
    raise SystemExit(main())
