"""Tells a cluster's scheduler what nobody else tells: nodes that come, change and are lost, and jobs whose workflows
have closed without a word.

One observer per cluster is enough, several do no harm: marking a node as lost is one conditional write, and telling a
thing twice is telling it once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Protocol

import structlog
from temporalio.client import Client
from temporalio.service import RPCError

from activities.fates import TemporalFates
from activities.inbox import Inbox
from infra.ends import Ends
from infra.node_watch import NodeWatch
from model.control import TELL_AGAIN, Directive, JobClosed, JobNotice, NodeNotice
from model.errors import ModelError
from model.ids import JobId, NodeId
from model.names import JOB_WORKFLOW, Signal
from model.records import NodeRecord
from proxy_runtime.errors import ErgoError
from scheduling.constants import POLICY
from scheduling.state import ClusterState

LOOK_S = 1.0
CLOSED_S = 3.0
RECONCILE_S = 60.0
_OVERLAP = timedelta(seconds=60)
"""Visibility lags behind, and its clock is another one."""

_OUTAGE_S = 30.0

_log = structlog.stdlib.get_logger(__name__)


class NodeStore(Protocol):
    """The part of the fleet's store that nodes need."""

    def nodes(self) -> list[NodeRecord]:
        """All node records."""
        ...

    def mark_lost(self, node: NodeId) -> None:
        """Gives an incarnation up."""
        ...


@dataclass(slots=True)
class Observer:
    """Watches nodes and closed jobs.

    Attributes:
        state: reads the scheduler's newest snapshot; blocking.
        ends: of jobs whose workflows were ended from outside, to be told to the world.
    """

    client: Client
    store: NodeStore
    inbox: Inbox
    state: Callable[[], ClusterState | None]
    ends: Ends
    clock: Callable[[], float] = time.monotonic
    _watch: NodeWatch = field(init=False)
    _strangers: dict[JobId, int] = field(default_factory=dict[JobId, int])

    def __post_init__(self) -> None:
        self._watch = NodeWatch(self.inbox.cluster)

    async def run(self) -> None:
        """Watches until it is cancelled. An error is logged, and the next look tries again."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._every(LOOK_S, "nodes are not seen", self.look_at_nodes))
            group.create_task(self._every(CLOSED_S, "closed jobs are not seen", self.look_at_closed))
            group.create_task(self._every(RECONCILE_S, "jobs are not compared", self.reconcile))

    # -- nodes ----------------------------------------------------------------------------------------------------

    async def look_at_nodes(self) -> None:
        """One look at all nodes."""
        records = await asyncio.to_thread(self.store.nodes)
        look = self._watch.look(records, self.clock())
        if look.holding:
            _log.error("most nodes are silent: an outage of the store or the network; none is given up",
                       nodes=[str(node) for node in look.holding])  # fmt: skip
        await self._tell_nodes(look.notices)
        for node in look.lost:
            try:
                await asyncio.to_thread(self.store.mark_lost, node)
            except ErgoError as error:
                _log.warning("a node is not given up", node=str(node), error=str(error))
                continue
            _log.warning("lost", node=str(node))
            await self._tell_nodes(self._watch.given_up(node, self.clock()))

    async def _tell_nodes(self, notices: tuple[NodeNotice, ...]) -> None:
        if notices:
            await self.inbox.tell(*notices)
            self._watch.told(notices, self.clock())
            for notice in notices:
                _log.info("told", node=str(notice.node), alive=notice.alive, jobs=[str(job) for job, _ in notice.jobs])

    # -- jobs -----------------------------------------------------------------------------------------------------

    async def look_at_closed(self) -> None:
        """Jobs whose workflows have closed lately and which the scheduler takes for alive."""
        await asyncio.to_thread(self.ends.publish_all)
        since = (datetime.now(UTC) - _OVERLAP).isoformat()
        query = f"WorkflowType = '{JOB_WORKFLOW}' AND ExecutionStatus != 'Running' AND CloseTime > '{since}'"
        closed = {found.id async for found in self.client.list_workflows(query)}
        if closed:
            state = await asyncio.to_thread(self.state)
            for job in state.jobs if state else ():
                if job.notice.job in closed:
                    await self._close(job.notice)

    async def reconcile(self) -> None:
        """Compares all: jobs that the scheduler believes in and are not, and jobs that it has never heard of."""
        state = await asyncio.to_thread(self.state)
        query = f"WorkflowType = '{JOB_WORKFLOW}' AND ExecutionStatus = 'Running'"
        alive = {found.id async for found in self.client.list_workflows(query)}
        known = {str(job.notice.job): job.notice for job in state.jobs} if state else {}
        for name, notice in known.items():
            if name not in alive:
                await self._close(notice)
        unknown = [JobId(name) for name in sorted(alive - set(known)) if _is_id(name)]
        self._strangers = {job: self._strangers.get(job, 0) + 1 for job in unknown}
        for job, looks in self._strangers.items():
            if looks > 1:  # a new job is on its way here by itself
                await self._ask(job)

    async def _close(self, notice: JobNotice) -> None:
        how = await TemporalFates(self.client).ask(notice.job, first_run=notice.workflow_run)
        if how is None:
            return  # it goes on, as a new run; or nobody knows
        _log.warning("a job's workflow is closed", job=str(notice.job), how=how)
        if how in ("terminated", "timed out"):
            # All other ends the workflow has told itself.
            await asyncio.to_thread(self.ends.add, notice, how)
        await asyncio.to_thread(self.ends.publish_all)
        await self.inbox.tell(JobClosed(notice.job, notice.workflow_run, how))

    async def _ask(self, job: JobId) -> None:
        """A job that the scheduler does not know tells its notice again."""
        text = "The scheduler does not know this job and asks for its notice."
        directive = Directive(f"ask-{int(time.time())}", "wait", text, POLICY, "", request=TELL_AGAIN)
        try:
            await self.client.get_workflow_handle(job).signal(Signal.PLACEMENT, directive)
        except RPCError as error:
            _log.warning("a job is not asked", job=str(job), error=error.message)
            return
        _log.warning("asked", job=str(job))

    async def _every(self, seconds: float, trouble: str, look: Callable[[], Awaitable[None]]) -> None:
        told = float("-inf")
        while True:
            try:
                await look()
            except (ErgoError, ModelError, RPCError, OSError) as error:
                if self.clock() - told > _OUTAGE_S:
                    told = self.clock()
                    _log.warning(trouble, error=str(error))
            await asyncio.sleep(seconds)


def _is_id(text: str) -> bool:
    try:
        JobId(text)
    except ModelError:
        return False
    return True
