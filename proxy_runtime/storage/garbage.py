"""Removing what nobody needs any more, in the bucket and in a node's store.

Two steps. `retain` drops the older checkpoints of a job that runs: their documents, so that nobody begins to read them.
`sweep` drops packs that no document names, and all of a job that has ended but its end.

What is written and not named yet is named by its parts document, which says whose it is. It holds its packs for as long
as they may still become a checkpoint: until that is committed, another epoch counts, the job has ended, or, where none
of this is ever heard of, an age that no operation reaches. A checkpoint that is dropped from a running job leaves such
a document too, for a while: who has begun to read it may finish.

A writer and a sweep at the same time: who pushes first writes a document that names its packs, then looks whether they
are there. A sweep first writes down what it condemns, then looks at all documents once more, removes what still is
named by none, and takes its list back. So either the sweep sees the writer's document and spares the pack, or the
writer sees the list and waits until the pack is gone or spared, before it looks whether it must bring it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from model.ids import CheckpointId, Epoch, JobId
from model.records import JobHead
from proxy_runtime.checkpoint import Store
from proxy_runtime.checkpoint.exchange import SETTLED_S
from proxy_runtime.storage import documents
from proxy_runtime.storage.blobs import Found
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
"""How long what was written waits to be committed: longer than all attempts to write on every node and to commit."""

RETAIN_AGE_S = 300.0
"""How long the document of an older checkpoint stays, and then its packs. A job's head does not move while it is
restored or moved, so that only somebody who reads an older one by its id can come too late, and is told."""

LAST_S = 2 * 86_400.0
"""How long the last checkpoint of a job stays that has ended without keeping its directory."""

_GRAVE = "dropped"


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
        store.exchange.retain({JobId(job): kept}, min_age_s, now())
    return Removed(removed)


@dataclass(slots=True)
class Sweeper:
    """Sweeps the packs of tenants, again and again. One sweep of a tenant at a time: of two the later gives up.

    Attributes:
        min_age_s: how long what was written waits to be committed.
        last_s: see `LAST_S`.
        now: the clock, in seconds since 1970, which is the bucket's too, nearly.
    """

    fleet: FleetStore
    min_age_s: float = MIN_AGE_S
    last_s: float = LAST_S
    now: Callable[[], float] = time.time
    _names: dict[str, tuple[float, frozenset[str]]] = field(default_factory=dict[str, tuple[float, frozenset[str]]])

    def sweep(self, tenant: str, ended: Collection[JobHead] = ()) -> Removed:
        """Removes packs that no checkpoint, volume or pending part needs, and lists of files likewise.

        Checkpoints that were made but never committed go too, and of jobs that have ended all but the final one; where
        there is none, because they failed or were cancelled, all but the last.

        Args:
            tenant: whose.
            ended: the heads, as they were read before their workflows were found to be closed and nothing of them to be
                under way. A head that another run of a workflow has opened since counts as one of a job that runs.

        Raises:
            StorageError: the store does not answer, or a document is damaged; nothing is removed that is needed.
        """
        bucket = self.fleet.bucket
        heads = {head.job: head for head in self.fleet.heads.read_all()}
        over = {
            head.job for head in ended if head.job in heads and heads[head.job].generation_run == head.generation_run
        }
        packs = bucket.find(f"tenants/{tenant}/packs")
        trees = bucket.find(f"tenants/{tenant}/trees")
        buried = self._bury_unreachable(tenant, heads, over)
        named, spent = self._named(tenant, heads, over)
        settled = self.now() - min(self.min_age_s, SETTLED_S)
        doomed = [found for found in [*packs, *trees] if found.modified_s < settled and found.key not in named]
        removed = self._remove(tenant, doomed, heads, over) if doomed else Removed()
        for part in spent:
            bucket.delete(part)
        return Removed(buried, removed.packs, removed.bytes)

    def _remove(
        self, tenant: str, doomed: Sequence[Found], heads: dict[JobId, JobHead], over: Collection[JobId]
    ) -> Removed:
        bucket = self.fleet.bucket
        key = documents.condemned_key(tenant)
        listed = Condemned(keys=tuple(found.key for found in doomed))
        if not bucket.create(key, listed.model_dump_json().encode()):
            other = bucket.look(key)
            if other is None or self.now() - other.modified_s < 10 * SWEEP_LIMIT_S:
                return Removed()
            bucket.put(key, listed.model_dump_json().encode())  # one that died long ago
        begun = time.monotonic()
        removed = size = 0
        try:
            named, _ = self._named(tenant, heads, over)
            for found in doomed:
                if time.monotonic() - begun > SWEEP_LIMIT_S:
                    break  # the next sweep goes on
                if found.key not in named:
                    bucket.delete(found.key)
                    removed, size = removed + found.key.endswith(".pack"), size + found.bytes
        finally:
            bucket.delete(key)
        return Removed(packs=removed, bytes=size)

    def _bury_unreachable(self, tenant: str, heads: dict[JobId, JobHead], over: Collection[JobId]) -> int:
        """Removes documents of checkpoints that no head leads to and that none ever will."""
        found = self.fleet.bucket.find(f"tenants/{tenant}/manifests")
        modified = {one.key: one.modified_s for one in found}
        young = self.now() - self.min_age_s
        reachable: set[str] = set()
        for head in heads.values():
            if head.tenant != tenant:
                continue
            if head.job not in over:
                kept = [each for chain in _chain(self.fleet, head, 1) for each in chain]
            else:
                kept = self._last(head, modified)
            reachable.update(documents.manifest_key(tenant, checkpoint) for checkpoint in kept)
        buried = 0
        for key in modified.keys() - reachable:
            document = documents.read(self.fleet.bucket, key, CheckpointDocument)
            if document is None:
                continue
            manifest = document.manifest
            if _is_over(manifest.job, manifest.epoch, heads, over):
                self.fleet.bucket.delete(key)
                buried += 1
            elif modified[key] < young:
                buried += _bury(self.fleet, tenant, key)
        return buried

    def _last(self, head: JobHead, modified: dict[str, float]) -> list[CheckpointId]:
        """What stays of a job that has ended."""
        if head.checkpoint is not None:
            at = modified.get(documents.manifest_key(head.tenant, head.checkpoint), self.now())
            if head.final is None and at >= self.now() - self.last_s:
                return [head.checkpoint]
            if not self.fleet.heads.let_go(head.job, head.generation_run):
                # Its workflow was reset this moment, and may go back to any of its checkpoints.
                return [each for chain in _chain(self.fleet, head, 1) for each in chain]
        return [] if head.final is None else [head.final]

    def _named(self, tenant: str, heads: dict[JobId, JobHead], over: Collection[JobId]) -> tuple[set[str], list[str]]:
        """Keys of packs and lists of files that documents name; and of parts documents that hold none any more."""
        bucket = self.fleet.bucket
        named: set[str] = set()
        for folder, shape in (("manifests", CheckpointDocument), ("volumes", VolumeDocument)):
            named.update(*self._names_of(tenant, f"tenants/{tenant}/{folder}", shape))
        spent: list[str] = []
        parts = bucket.find(f"tenants/{tenant}/parts")
        for found, part in zip(parts, _read_all(self.fleet, [f.key for f in parts], PartsDocument), strict=True):
            if part is None:
                continue
            if not self._pending(part, found.modified_s, heads, over):
                spent.append(found.key)
                continue
            named.update(documents.pack_key(tenant, pack) for pack, _ in part.packs)
            if part.tree is not None:
                named.add(documents.tree_key(tenant, part.tree))
        return named, spent

    def _pending(
        self, part: PartsDocument, modified_s: float, heads: dict[JobId, JobHead], over: Collection[JobId]
    ) -> bool:
        """Whether what a node has written may still become a checkpoint, or be read."""
        writer = part.writer
        if writer is not None and _is_over(writer.job, writer.epoch, heads, over):
            return False
        short = part.node == _GRAVE or (writer is not None and writer.committed)
        return modified_s >= self.now() - (min(self.min_age_s, RETAIN_AGE_S) if short else self.min_age_s)

    def _names_of(
        self, tenant: str, prefix: str, shape: type[CheckpointDocument] | type[VolumeDocument]
    ) -> list[frozenset[str]]:
        """What documents name that never change once they are there, so that each is read once."""
        found = {one.key: one.modified_s for one in self.fleet.bucket.find(prefix)}
        for key in [key for key in self._names if key.startswith(f"{prefix}/") and key not in found]:
            del self._names[key]
        fresh = [key for key, at in found.items() if key not in self._names or self._names[key][0] != at]
        for key, document in zip(fresh, _read_all(self.fleet, fresh, shape), strict=True):
            if document is None:  # removed since
                self._names.pop(key, None)
                continue
            tree = document.volume if isinstance(document, VolumeDocument) else document.manifest.volume
            names = {documents.pack_key(tenant, pack) for pack, _ in document.packs}
            if tree is not None:
                names.add(documents.tree_key(tenant, tree))
            self._names[key] = found[key], frozenset(names)
        return [self._names[key][1] for key in found if key in self._names]


def sweep(
    fleet: FleetStore, tenant: str, *, min_age_s: float = MIN_AGE_S, now: Callable[[], float] = time.time
) -> Removed:
    """One sweep of a tenant by somebody who does not know which jobs have ended; see `Sweeper`."""
    return Sweeper(fleet, min_age_s, now=now).sweep(tenant)


def _is_over(job: JobId, epoch: Epoch, heads: dict[JobId, JobHead], over: Collection[JobId]) -> bool:
    """Whether an epoch of a job can never commit any more. Heads that are out of date only say so too rarely."""
    head = heads.get(job)
    return head is not None and (epoch < head.epoch or (job in over and epoch <= head.allocated))


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


def _bury(fleet: FleetStore, tenant: str, key: str) -> int:
    """Removes a checkpoint's document; what it names stays a while for whoever reads it now."""
    document = documents.read(fleet.bucket, key, CheckpointDocument)
    if document is None:
        return 0
    manifest = document.manifest
    grave = PartsDocument(node=_GRAVE, packs=document.packs, tree=manifest.volume)
    documents.write(fleet.bucket, f"tenants/{tenant}/parts/{manifest.root}.json", grave)
    fleet.bucket.delete(key)
    return 1


D = TypeVar("D", bound=Document)


def _read_all(fleet: FleetStore, keys: Sequence[str], shape: type[D]) -> list[D | None]:
    with ThreadPoolExecutor(16, "ergo-sweep") as pool:
        return list(pool.map(lambda key: documents.read(fleet.bucket, key, shape), keys))
