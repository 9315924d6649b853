"""Removing what nobody needs any more, in the bucket and in a node's store.

Two steps. `retain` drops the older checkpoints of one job: their documents, so that nobody begins to read them. `sweep`
drops packs that no document names. A checkpoint that is dropped leaves a young document that names its packs for the
length of an age limit, longer than any transfer takes: who has begun to pull it has this long to finish.

A writer and a sweep at the same time: who pushes first writes a document that names its packs, then looks whether they
are there. A sweep first writes down what it condemns, then looks at all documents once more, removes what still is
named by none, and takes its list back. So either the sweep sees the writer's document and spares the pack, or the
writer sees the list and waits until the pack is gone or spared, before it looks whether it must bring it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from model.ids import CheckpointId
from model.records import JobHead
from proxy_runtime.checkpoint import Store
from proxy_runtime.storage import documents
from proxy_runtime.storage.documents import (
    SWEEP_LIMIT_S,
    CheckpointDocument,
    Condemned,
    Document,
    PartsDocument,
    VolumeDocument,
)
from proxy_runtime.storage.fleet import FleetStore

MIN_AGE_S = 3600.0
"""How long a pack that nothing names stays: a checkpoint of several nodes is named only when the last has written."""

RETAIN_AGE_S = 300.0
"""How long the document of an older checkpoint stays. A job's head does not move while it is restored or moved, so that
only somebody who reads an older one by its id can come too late, and is told."""


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed from the bucket."""

    checkpoints: int = 0
    packs: int = 0
    bytes: int = 0


def retain(
    fleet: FleetStore,
    job: str,
    keep: int,
    *,
    store: Store | None = None,
    min_age_s: float = RETAIN_AGE_S,
    now: Callable[[], float] = time.time,
) -> Removed:
    """Keeps the newest checkpoints of a job: its head's, and of the ones before as many as make this number.

    The checkpoint of its end stays too. Packs stay until `sweep`; in a node's store they go now.

    Args:
        fleet: the fleet's store.
        job: the job.
        keep: how many, at least 1.
        store: a node's store to be cleaned too.
        min_age_s: what came within so many seconds stays.
        now: the clock, in seconds since 1970, which is the bucket's too, nearly.

    Raises:
        StorageError: the store does not answer, or a document is damaged; nothing is removed that is needed.
        CheckpointError: the node's store is busy all the time.
    """
    head = fleet.head(job)
    if head is None:
        return Removed()
    kept, older = _chain(fleet, head, max(1, keep))
    removed = 0
    for checkpoint in older:
        key = documents.manifest_key(head.tenant, checkpoint)
        found = fleet.bucket.look(key)
        if found is not None and now() - found.modified_s > min_age_s:
            removed += _bury(fleet, head.tenant, key)
    if store is not None:
        store.exchange.retain(job, kept, min_age_s, now())
    return Removed(removed)


def sweep(
    fleet: FleetStore, tenant: str, *, min_age_s: float = MIN_AGE_S, now: Callable[[], float] = time.time
) -> Removed:
    """Removes packs of a tenant that no checkpoint, volume or young part needs, and lists of files likewise.

    Checkpoints that were made but never committed go too. One sweep of a tenant at a time: of two the later gives up.

    Raises:
        StorageError: the store does not answer, or a document is damaged; nothing is removed that is needed.
    """
    bucket = fleet.bucket
    young = now() - min_age_s
    packs = bucket.find(f"tenants/{tenant}/packs")
    trees = bucket.find(f"tenants/{tenant}/trees")
    orphans = _orphans(fleet, tenant, young)
    buried = sum(_bury(fleet, tenant, orphan) for orphan in orphans)
    named = _named(fleet, tenant, young)
    doomed = [found for found in [*packs, *trees] if found.modified_s < young and found.key not in named]
    if not doomed:
        return Removed(buried)
    key = documents.condemned_key(tenant)
    listed = Condemned(keys=tuple(found.key for found in doomed))
    if not bucket.create(key, listed.model_dump_json().encode()):
        other = bucket.look(key)
        if other is None or now() - other.modified_s < 10 * SWEEP_LIMIT_S:
            return Removed(buried)
        bucket.put(key, listed.model_dump_json().encode())  # one that died long ago
    begun = time.monotonic()
    removed = size = 0
    try:
        named = _named(fleet, tenant, young)
        for found in doomed:
            if time.monotonic() - begun > SWEEP_LIMIT_S:
                break  # the next sweep goes on
            if found.key not in named:
                bucket.delete(found.key)
                removed, size = removed + found.key.endswith(".pack"), size + found.bytes
        for part in bucket.find(f"tenants/{tenant}/parts"):
            if part.modified_s < young:
                bucket.delete(part.key)
    finally:
        bucket.delete(key)
    return Removed(buried, removed, size)


def _chain(fleet: FleetStore, head: JobHead, keep: int) -> tuple[list[CheckpointId], list[CheckpointId]]:
    """A job's checkpoints that stay, its last one included, and the older ones that are still there."""
    kept: list[CheckpointId] = [] if head.final is None else [head.final]
    older: list[CheckpointId] = []
    at = head.checkpoint
    number = 0
    while at is not None and at not in older and number < 100_000:
        document = documents.read(fleet.bucket, documents.manifest_key(head.tenant, at), CheckpointDocument)
        if document is None:
            break
        number += 1
        (kept if number <= keep else older).append(at)
        at = document.manifest.header.parent
    return kept, [checkpoint for checkpoint in older if checkpoint not in kept]


def _orphans(fleet: FleetStore, tenant: str, young: float) -> list[str]:
    """Documents of checkpoints that no head leads to, and that are not young."""
    committed = {
        documents.manifest_key(tenant, checkpoint)
        for head in fleet.heads.read_all()
        if head.tenant == tenant
        for checkpoint in chain.from_iterable(_chain(fleet, head, 1))
    }
    found = fleet.bucket.find(f"tenants/{tenant}/manifests")
    return [one.key for one in found if one.key not in committed and one.modified_s < young]


def _bury(fleet: FleetStore, tenant: str, key: str) -> int:
    """Removes a checkpoint's document; what it names stays for as long as a part that was just written."""
    document = documents.read(fleet.bucket, key, CheckpointDocument)
    if document is None:
        return 0
    manifest = document.manifest
    grave = PartsDocument(node="dropped", packs=document.packs, tree=manifest.volume)
    documents.write(fleet.bucket, f"tenants/{tenant}/parts/{manifest.root}.json", grave)
    fleet.bucket.delete(key)
    return 1


def _named(fleet: FleetStore, tenant: str, young: float) -> set[str]:
    """Keys of packs and lists of files that documents name."""
    bucket = fleet.bucket
    checkpoints = [f.key for f in bucket.find(f"tenants/{tenant}/manifests")]
    volumes = [f.key for f in bucket.find(f"tenants/{tenant}/volumes")]
    parts = [f.key for f in bucket.find(f"tenants/{tenant}/parts") if f.modified_s >= young]
    named: set[str] = set()
    for checkpoint in _read_all(fleet, checkpoints, CheckpointDocument):
        named.update(documents.pack_key(tenant, pack) for pack, _ in checkpoint.packs)
        if checkpoint.manifest.volume is not None:
            named.add(documents.tree_key(tenant, checkpoint.manifest.volume))
    for volume in _read_all(fleet, volumes, VolumeDocument):
        named.update(documents.pack_key(tenant, pack) for pack, _ in volume.packs)
        named.add(documents.tree_key(tenant, volume.volume))
    for part in _read_all(fleet, parts, PartsDocument):
        named.update(documents.pack_key(tenant, pack) for pack, _ in part.packs)
        if part.tree is not None:
            named.add(documents.tree_key(tenant, part.tree))
    return named


D = TypeVar("D", bound=Document)


def _read_all(fleet: FleetStore, keys: Sequence[str], shape: type[D]) -> list[D]:
    with ThreadPoolExecutor(16, "ergo-sweep") as pool:
        found = pool.map(lambda key: documents.read(fleet.bucket, key, shape), keys)
        return [document for document in found if document is not None]
