"""Activities of a cluster's scheduler: `notify` brings a word in, `decide` plans, `deliver_plan` tells the jobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import structlog
from temporalio import activity
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.inbox import Inbox
from activities.snapshots import Snapshots, SnapshotStore
from model.cluster import DecideInput, DecideResult, DeliverPlanInput, DeliverPlanResult
from model.control import AddressedDirective, NotifyInput
from model.ids import JobId
from model.names import CLUSTER_TASK_QUEUE, Activity, Signal
from scheduling.ledger import apply, commit, restored
from scheduling.policy import decide
from scheduling.state import ClusterState

SIGNALS_AT_ONCE = 8
"""So many signals of a delivery are under way at a time: with more the server only queues (measured)."""

_log = structlog.stdlib.get_logger(__name__)


class ClusterActivities:
    """The three activities, with the client and the store that they use. All are coroutines of the worker's loop."""

    def __init__(self, client: Client, store: SnapshotStore, *, queue: str = CLUSTER_TASK_QUEUE) -> None:
        self._client = client
        self._store = store
        self._queue = queue
        self._inboxes: dict[str, Inbox] = {}
        self._snapshots: dict[str, Snapshots] = {}

    @property
    def all(self) -> list[Callable[..., Any]]:
        """For `Worker(activities=…)`."""
        return [self.notify, self.decide, self.deliver_plan]

    def inbox(self, cluster: str) -> Inbox:
        """The way into a cluster's scheduler, which all in this process share."""
        return self._inboxes.setdefault(cluster, Inbox(self._client, cluster, task_queue=self._queue))

    def snapshots(self, cluster: str) -> Snapshots:
        """A cluster's states, which all in this process share."""
        return self._snapshots.setdefault(cluster, Snapshots(self._store, cluster))

    @activity.defn(name=Activity.NOTIFY)
    async def notify(self, input: NotifyInput) -> None:
        """Tells the scheduler a job's notice; done when it is in the history of the scheduler's workflow."""
        await self.inbox(input.cluster).tell(input.notice)

    @activity.defn(name=Activity.DECIDE)
    async def decide(self, input: DecideInput) -> DecideResult:
        """One tick: folds in, plans, writes the next snapshot. Deciding twice on one digest is deciding once."""
        return await asyncio.to_thread(tick, self.snapshots(input.cluster), input)

    @activity.defn(name=Activity.DELIVER_PLAN)
    async def deliver_plan(self, input: DeliverPlanInput) -> DeliverPlanResult:
        """Signals every job of a plan; jobs whose workflows are gone are in the result.

        Raises:
            RPCError: Temporal did not take some; all are told again then, and a job ignores what it has seen.
        """
        slots = asyncio.Semaphore(SIGNALS_AT_ONCE)

        async def tell(item: AddressedDirective) -> JobId | None:
            async with slots:
                activity.heartbeat()
                directive = item.directive
                log = _log.bind(job=item.job, decision=directive.decision, action=directive.action)
                try:
                    await self._client.get_workflow_handle(item.job).signal(Signal.PLACEMENT, directive)
                except RPCError as error:
                    if error.status is RPCStatusCode.NOT_FOUND:
                        log.info("the job's workflow is gone")
                        return item.job
                    raise
                log.info("told", reason=directive.reason)
                return None

        results = await asyncio.gather(*map(tell, input.directives), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return DeliverPlanResult(tuple(job for job in results if isinstance(job, str)))


def tick(snapshots: Snapshots, input: DecideInput) -> DecideResult:
    """What `decide` does, blocking."""
    begun = time.perf_counter()
    state = snapshots.read(input.digest) if input.digest else None
    if state is None:
        # The scheduler's workflow is new, or its snapshot is gone. The newest one there is may be older than what was
        # told since: all jobs are asked for their notices, and nothing is given away until they had time to answer.
        # Where there is none, nodes that have parts of unknown jobs are not used; the observer asks those jobs.
        newest = snapshots.newest()
        state = restored(newest, input.now) if newest else ClusterState(input.cluster)
        if newest or input.digest:
            _log.warning("restored", cluster=input.cluster, lost=input.digest, tick=state.tick, jobs=len(state.jobs))
    base = apply(state, input.inbox, input.now)
    _tell_findings(state, base)
    plan = decide(base, input.now)
    done = commit(base, plan, input.now)
    digest = snapshots.write(done.base, done.state)
    _log.info(
        "decided",
        cluster=input.cluster,
        tick=base.tick,
        digest=digest,
        summary=plan.summary,
        jobs=len(base.jobs),
        words=sum(len(batch.jobs) + len(batch.nodes) + len(batch.closed) for batch in input.inbox),
        seconds=round(time.perf_counter() - begun, 3),
    )
    return DecideResult(digest, done.directives, plan.wake_s, plan.summary)


def _tell_findings(before: ClusterState, after: ClusterState) -> None:
    """Logs what nodes and the ledger have come to say differently, and what has settled."""
    old, new = (
        {(item.kind, item.job, item.node): item for item in one.findings if item.counts} for one in (before, after)
    )
    for key, item in new.items():
        if key not in old:
            _log.warning("contradiction", kind=item.kind, job=item.job, node=str(item.node), text=item.text)
    for key, item in old.items():
        if key not in new:
            _log.info("no contradiction any more", kind=item.kind, job=item.job, node=str(item.node))
