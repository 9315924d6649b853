"""The worker of a cluster: its scheduling workflow, the activities of it, and the observer of nodes and closed jobs.

    python -m infra.cluster_worker

It may be killed at any moment and started again; a second one beside it does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import stamina
import structlog

from activities.cluster import ClusterActivities
from events.producer import EventProducer
from events.types import JobPhaseChanged, JobPhaseChangedData
from infra.ends import Ends
from infra.housekeeping import EndedJobs, keep_house
from infra.job_worker import workflow_runner
from infra.observer import Observer
from infra.settings import Settings
from infra.working import run, until_over
from model.control import JobNotice, OpenJobInput
from model.ids import EventId, Sequence
from model.job_state import JobPhase
from model.names import CLUSTER_TASK_QUEUE
from proxy_runtime.storage.garbage import LAST_S

if TYPE_CHECKING:
    from temporalio.client import Client
    from temporalio.worker import Worker

    from proxy_runtime.storage.fleet import FleetStore

_ACTIVITIES = 1000  # `notify` waits for its half second; a storm of jobs must not wait for one another

_log = structlog.stdlib.get_logger(__name__)


def cluster_worker(client: Client, activities: ClusterActivities, *, queue: str = CLUSTER_TASK_QUEUE) -> Worker:
    """A worker for the scheduling workflow of clusters and its activities."""
    from temporalio.worker import Worker

    from workflows.cluster import ClusterScheduler

    return Worker(
        client,
        task_queue=queue,
        workflows=[ClusterScheduler],
        activities=activities.all,
        max_concurrent_activities=_ACTIVITIES,
        workflow_runner=workflow_runner(),
        graceful_shutdown_timeout=timedelta(seconds=5),
    )


def end_publisher(fleet: FleetStore, producer: EventProducer, cluster: str) -> Callable[[JobNotice, str], None]:
    """Publishes the end of a job whose workflow was terminated: it cannot do so itself.

    The event is of a generation of its own, which also keeps whatever is left of the workflow from publishing more.
    Calling it again publishes the same event.
    """

    def publish(notice: JobNotice, how: str) -> None:
        head = fleet.head(notice.job)
        if head is None or head.first_execution_run != notice.workflow_run:
            _log.info("no end is published: the record is another job's", job=str(notice.job))
            return
        opened = fleet.open_job(
            OpenJobInput(notice.job, head.tenant, notice.workflow_run, f"closed-{notice.workflow_run}")
        )
        data = JobPhaseChangedData(
            before=notice.phase, after=JobPhase.CANCELLED, reason=f"The job's workflow was {how}.", step=opened.step
        )
        event = JobPhaseChanged(
            id=EventId(notice.job, notice.workflow_run, opened.generation, Sequence(1)),
            source=f"/clusters/{cluster}",
            subject=notice.job,
            time=datetime.now(UTC),
            tenant=head.tenant,
            epoch=opened.epoch,
            data=data,
        )
        producer.publish([event])

    return publish


async def work(settings: Settings, over: asyncio.Event) -> None:
    """Works until `over`; connects again whenever the worker or the observer fails."""
    fleet = settings.fleet_store()
    producer = EventProducer(settings.kafka(), client_id="cluster-worker")
    try:
        async for attempt in stamina.retry_context(on=Exception, attempts=None, timeout=None, wait_max=5.0):
            with attempt:
                client = await settings.connect_temporal(identity="cluster-worker")
                activities = ClusterActivities(client, fleet)
                observer = Observer(
                    client,
                    fleet,
                    activities.inbox(settings.cluster),
                    activities.snapshots(settings.cluster).newest,
                    Ends(fleet.bucket, settings.cluster, end_publisher(fleet, producer, settings.cluster)),
                )
                _log.info("works", queue=CLUSTER_TASK_QUEUE, cluster=settings.cluster)
                worker = cluster_worker(client, activities)
                last_s = LAST_S if settings.keep_last_s is None else settings.keep_last_s
                ended = EndedJobs(client, fleet).find
                observing = asyncio.create_task(observer.run())
                sweeping = asyncio.create_task(keep_house(fleet, ended, last_s=last_s))
                try:
                    await until_over(over, worker, observing)
                finally:
                    sweeping.cancel()
    finally:
        producer.close()


def main() -> int:
    """Entry point."""
    return run("cluster-worker", work)


if __name__ == "__main__":
    raise SystemExit(main())
