"""Removes, now and then, what nobody needs any more in the fleet's store."""

from __future__ import annotations

import asyncio

import structlog

from proxy_runtime.errors import ErgoError
from proxy_runtime.storage import garbage
from proxy_runtime.storage.fleet import FleetStore

EVERY_S = 600.0

_log = structlog.stdlib.get_logger(__name__)


async def keep_house(fleet: FleetStore, *, every_s: float = EVERY_S, min_age_s: float = garbage.MIN_AGE_S) -> None:
    """Sweeps the packs of every tenant that has jobs, every `every_s` seconds, until cancelled.

    A store that does not answer is tried again the next time. Several who do this at once do no harm.
    """
    while True:
        await asyncio.sleep(every_s)
        try:
            await asyncio.to_thread(sweep, fleet, min_age_s)
        except ErgoError as error:
            _log.warning("the store could not be swept", code=error.code, error=str(error))


def sweep(fleet: FleetStore, min_age_s: float = garbage.MIN_AGE_S) -> None:
    """One sweep of all tenants.

    Raises:
        StorageError: the store does not answer.
    """
    for tenant in sorted({head.tenant for head in fleet.heads.read_all()}):
        removed = garbage.sweep(fleet, tenant, min_age_s=min_age_s)
        if removed.packs or removed.checkpoints:
            _log.info("swept", tenant=str(tenant), packs=removed.packs, bytes=removed.bytes)
