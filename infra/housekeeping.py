"""Chores that are done now and then; removing what nobody needs any more from the fleet's store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from proxy_runtime.errors import ErgoError
from proxy_runtime.storage import garbage
from proxy_runtime.storage.fleet import FleetStore

EVERY_S = 600.0

_log = structlog.stdlib.get_logger(__name__)


async def regularly(chore: Callable[[], None], trouble: str, *, every_s: float = EVERY_S) -> None:
    """Does a blocking chore every `every_s` seconds, until cancelled. One that fails is logged, and due the next time.

    Args:
        chore: raises `ErgoError` where it cannot be done now.
        trouble: what the log then says.
        every_s: seconds before each.
    """
    while True:
        await asyncio.sleep(every_s)
        try:
            await asyncio.to_thread(chore)
        except ErgoError as error:
            _log.warning(trouble, code=error.code, error=str(error))


async def keep_house(fleet: FleetStore, *, every_s: float = EVERY_S, min_age_s: float = garbage.MIN_AGE_S) -> None:
    """Sweeps the packs of every tenant that has jobs, until cancelled. Several who do this at once do no harm."""
    await regularly(lambda: sweep(fleet, min_age_s), "the store could not be swept", every_s=every_s)


def sweep(fleet: FleetStore, min_age_s: float = garbage.MIN_AGE_S) -> None:
    """One sweep of all tenants.

    Raises:
        StorageError: the store does not answer.
    """
    for tenant in sorted({head.tenant for head in fleet.heads.read_all()}):
        removed = garbage.sweep(fleet, tenant, min_age_s=min_age_s)
        if removed.packs or removed.checkpoints:
            _log.info("swept", tenant=str(tenant), packs=removed.packs, bytes=removed.bytes)
