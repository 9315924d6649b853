"""Chores that are done now and then; removing what nobody needs any more from the fleet's store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

import structlog
from temporalio.client import Client
from temporalio.service import RPCError

from activities.fates import TemporalFates
from model.ids import JobId
from model.names import JOB_WORKFLOW
from model.records import JobHead
from proxy_runtime.errors import ErgoError
from proxy_runtime.storage import garbage
from proxy_runtime.storage.fleet import FleetStore

EVERY_S = 60.0

_log = structlog.stdlib.get_logger(__name__)


async def regularly(chore: Callable[[], Awaitable[None]], trouble: str, *, every_s: float = EVERY_S) -> None:
    """Does a chore every `every_s` seconds, until cancelled. One that fails is logged, and due the next time.

    Args:
        chore: raises `ErgoError` where it cannot be done now.
        trouble: what the log then says.
        every_s: seconds before each.
    """
    while True:
        await asyncio.sleep(every_s)
        try:
            await chore()
        except ErgoError as error:
            _log.warning(trouble, code=error.code, error=str(error))


@dataclass(slots=True)
class EndedJobs:
    """Finds the jobs whose workflows have closed.

    A job counts as ended when it is found closed for the second time: its nodes notice the end of a workflow that was
    terminated some seconds later, and may have a checkpoint under way.
    """

    client: Client
    fleet: FleetStore
    _closed: dict[JobId, str] = field(default_factory=dict[JobId, str])

    async def find(self) -> list[JobHead]:
        """The heads of ended jobs, as they were read before.

        Raises:
            StorageError: the store does not answer.
        """
        heads = await asyncio.to_thread(self.fleet.heads.read_all)
        before, self._closed = self._closed, {}
        fates = TemporalFates(self.client)
        try:
            query = f"WorkflowType = '{JOB_WORKFLOW}' AND ExecutionStatus = 'Running'"
            running = {found.id async for found in self.client.list_workflows(query)}
            for head in heads:
                if head.job in running:
                    continue
                if before.get(head.job) == head.generation_run or await self._is_closed(fates, head):
                    self._closed[head.job] = head.generation_run
        except RPCError as error:
            self._closed = before
            _log.warning("nobody says which jobs have ended", error=str(error))
        return [head for head in heads if before.get(head.job) == head.generation_run == self._closed.get(head.job)]

    @staticmethod
    async def _is_closed(fates: TemporalFates, head: JobHead) -> bool:
        how = await fates.ask(head.job, first_run=head.first_execution_run)
        # One that Temporal has forgotten, or that is in another one, may be any job.
        return how is not None and (how != "removed" or head.final is not None)


async def _none() -> Collection[JobHead]:
    return ()


async def keep_house(
    fleet: FleetStore,
    ended: Callable[[], Awaitable[Collection[JobHead]]] = _none,
    *,
    every_s: float = EVERY_S,
    min_age_s: float = garbage.MIN_AGE_S,
    last_s: float = garbage.LAST_S,
) -> None:
    """Sweeps the packs of every tenant that has jobs, until cancelled. Several who do this at once do no harm.

    Args:
        fleet: the fleet's store.
        ended: finds the jobs that have ended, see `EndedJobs`.
        every_s: seconds before each.
        min_age_s, last_s: as of `garbage.Sweeper`.
    """
    sweeper = garbage.Sweeper(fleet, min_age_s, last_s)

    async def sweep() -> None:
        await asyncio.to_thread(_sweep, sweeper, await ended())

    await regularly(sweep, "the store could not be swept", every_s=every_s)


def _sweep(sweeper: garbage.Sweeper, ended: Collection[JobHead]) -> None:
    for tenant in sweeper.fleet.tenants():
        removed = sweeper.sweep(tenant, ended)
        if removed.packs or removed.checkpoints:
            _log.info("swept", tenant=tenant, checkpoints=removed.checkpoints, packs=removed.packs, bytes=removed.bytes)
