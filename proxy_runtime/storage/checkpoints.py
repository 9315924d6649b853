"""Checkpoints on their way: from a node to the bucket, and from other nodes or the bucket to a node.

Packs are the unit. A pack holds only chunks that were new when it was written, so a later checkpoint pushes little; who
pulls it needs the packs with older chunks too, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import stamina

from model.ids import Epoch, JobId
from model.manifest import Manifest, ManifestHeader, PartRef, Tree
from model.runtime import NodeParts
from proxy_runtime.checkpoint import Part, Store, WrittenParts
from proxy_runtime.checkpoint.parts import parse_tree
from proxy_runtime.storage import documents, receiving
from proxy_runtime.storage.documents import (
    SWEEP_LIMIT_S,
    CheckpointDocument,
    Condemned,
    PackSize,
    PartsDocument,
    Share,
    Writer,
)
from proxy_runtime.storage.errors import BUSY, StorageError, missing
from proxy_runtime.storage.fleet import FleetStore
from proxy_runtime.storage.sources import Source
from proxy_runtime.storage.transfers import Meter, Progress, each


@dataclass(frozen=True, slots=True)
class Pushed:
    """What was missing in the bucket and is there now."""

    packs: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """What was missing here and is here now, proved."""

    packs: int
    chunks: int
    bytes: int


def push(
    fleet: FleetStore,
    store: Store,
    parts: NodeParts,
    packs: Sequence[str],
    *,
    of: tuple[JobId, Epoch] | None = None,
    stored_bytes: int = 0,
    progress: Progress | None = None,
    parallel: int = 4,
) -> Pushed:
    """Puts what a node has written of a checkpoint into the bucket, as far as it is not there.

    Args:
        fleet: the fleet's store.
        store: the node's, where the packs are.
        parts: what was written.
        packs: the packs that hold it, as `WrittenParts.packs` says.
        of: the job and the epoch that write it; what they leave behind goes the sooner.
        stored_bytes: what it added to the node's store.
        progress: told of bytes.
        parallel: packs at a time.

    Raises:
        StorageError: the bucket does not answer, refuses or is full. The call may be repeated; what is there stays.
        CheckpointError: a part is not in the node's store.
    """
    tenant, exchange = store.tenant, store.exchange
    exchange.touch(packs)  # a push that is repeated after an outage must still find them
    sizes = [(pack, exchange.path(pack).stat().st_size) for pack in packs]
    volume_packs: list[str] = []
    if parts.volume is not None:
        volume_packs = exchange.packs_of(parts.volume)
    document = PartsDocument(
        node=str(parts.node if of is None else Writer(str(parts.node), *of)),
        packs=tuple(sizes),
        volume_packs=tuple(volume_packs),
        tree=parts.volume,
        stored_bytes=stored_bytes,
    )
    # Before what it names, so that from now on nothing of that is taken for garbage.
    documents.write(fleet.bucket, documents.parts_key(tenant, parts), document)
    if parts.volume is not None:
        fleet.bucket.put(documents.tree_key(tenant, parts.volume), exchange.tree_bytes(parts.volume))
    return push_packs(fleet, store, sizes, progress=progress, parallel=parallel)


def push_packs(
    fleet: FleetStore, store: Store, sizes: Sequence[PackSize], *, progress: Progress | None = None, parallel: int = 4
) -> Pushed:
    """Puts packs into the bucket that it lacks; a document there must name them already."""
    _await_sweep(fleet, store.tenant, sizes)
    meter = Meter(sum(size for _, size in sizes), progress)

    def one(item: PackSize) -> int:
        pack, size = item
        key = documents.pack_key(store.tenant, pack)
        sent = 0
        if fleet.bucket.size(key) != size:
            fleet.bucket.put_file(key, store.exchange.path(pack))
            if (found := fleet.bucket.size(key)) != size:
                raise StorageError(f"{key} in {fleet.bucket.url} has {found} bytes after {size} were written.")
            sent = size
        meter.add(size)
        return sent

    with store.exchange.held():
        sent = each(sizes, one, parallel)
    return Pushed(sum(1 for count in sent if count), sum(sent))


def assemble(
    fleet: FleetStore,
    store: Store,
    job: str,
    epoch: int,
    header: ManifestHeader,
    parts: Sequence[NodeParts],
    *,
    volume: NodeParts | None = None,
) -> Manifest:
    """Makes a checkpoint of what all nodes have pushed, in this node's store and in the bucket. Commits no head.

    Args:
        fleet: the fleet's store.
        store: this node's.
        job: the job.
        epoch: the epoch that takes it.
        header: of the whole job.
        parts: of all nodes.
        volume: the joined one of `volumes.join_volumes`; needed where those of the nodes differ.

    Raises:
        StorageError: parts or packs of a node are not in the bucket.
        CheckpointError: the parts do not fit the header.
    """
    every = [*parts, volume] if volume is not None else [*parts]
    found = [_parts_document(fleet, store.tenant, part) for part in every]
    sizes = dict(pack for document in found for pack in document.packs)
    volumes = [part.volume for part in every if part.volume is not None]
    if volume is None and len({ref.digest for ref in volumes}) > 1:
        raise ValueError("Volumes of several nodes must be joined.")
    chosen = volumes[-1] if volumes else None
    refs = {} if chosen is None else {Part.volume(): chosen}
    for rank in (rank for part in parts for rank in part.ranks):
        if rank.process is not None:
            refs[Part.process(rank.rank)] = rank.process
        if rank.device is not None:
            refs[Part.device(rank.rank)] = rank.device
    exits = {rank.rank: rank.exit_code for part in parts for rank in part.ranks if rank.exit_code is not None}
    written = WrittenParts(refs, tuple(sorted(sizes)), sum(document.stored_bytes for document in found), exits)
    lacking = [p for p, size in sizes.items() if fleet.bucket.size(documents.pack_key(store.tenant, p)) != size]
    if lacking:
        raise missing(f"Pack {lacking[0]} of job {job}", fleet.bucket.url)
    manifest = store.assemble(job, epoch, header, [written]).manifest
    document = CheckpointDocument(
        manifest=manifest,
        packs=tuple(sorted(sizes.items())),
        shares=tuple(
            Share(ranks=tuple(r.rank for r in part.ranks), packs=tuple(pack for pack, _ in doc.packs))
            for part, doc in zip(parts, found, strict=False)
        ),
        volume_packs=tuple(sorted({pack for doc in found for pack in doc.volume_packs})),
    )
    documents.write(fleet.bucket, documents.manifest_key(store.tenant, manifest.root), document)
    return manifest


def settle(fleet: FleetStore, tenant: str, parts: Sequence[NodeParts]) -> None:
    """Notes that a checkpoint of these parts is committed, so that they keep their packs no longer than a retry needs.

    Raises:
        StorageError: the bucket does not answer.
    """
    for part in parts:
        key = documents.parts_key(tenant, part)
        document = documents.read(fleet.bucket, key, PartsDocument)
        if document is not None and (writer := document.writer) is not None and not writer.committed:
            settled = document.model_copy(update={"node": str(writer._replace(committed=True))})
            documents.write(fleet.bucket, key, settled)


def read_checkpoint(fleet: FleetStore, tenant: str, checkpoint: str) -> CheckpointDocument:
    """A checkpoint's document from the bucket.

    Raises:
        StorageError: there is none, or it is damaged.
    """
    document = documents.read(fleet.bucket, documents.manifest_key(tenant, checkpoint), CheckpointDocument)
    if document is None:
        raise missing(f"Checkpoint {checkpoint}", fleet.bucket.url)
    return document


def pull(
    fleet: FleetStore,
    store: Store,
    checkpoint: str,
    sources: Sequence[Source],
    *,
    ranks: Sequence[int] = (),
    progress: Progress | None = None,
    parallel: int = 4,
    deadline_s: float = 600.0,
) -> Pulled:
    """Brings a checkpoint to this node: the packs that are missing, each proved, then its manifest.

    A pull that is repeated, also after it was killed, goes on where it ended.

    Args:
        fleet: the fleet's store.
        store: this node's.
        checkpoint: its id.
        sources: asked in this order for every pack, see `sources.resolve`.
        ranks: whose parts are needed; empty for all. The volume always is.
        progress: told of bytes.
        parallel: packs at a time.
        deadline_s: how long to wait for another process that pulls the same pack.

    Raises:
        StorageError: no source has a pack (``storage.missing``), none has it undamaged (``storage.damaged``), or the
            disk is full (``storage.full``).
        CheckpointError: the manifest is damaged.
    """
    document = read_checkpoint(fleet, store.tenant, checkpoint)
    exchange = store.exchange
    needed = document.needed(tuple(ranks))
    with exchange.held():
        wanted = [item for item in needed if not exchange.has(item[0])]
        meter = Meter(sum(size for _, size in wanted), progress)

        def one(item: PackSize) -> tuple[int, int]:
            return receiving.receive(exchange, store.tenant, item, sources, meter.add, deadline_s)

        counts = each(wanted, one, parallel)
        store.adopt(document.manifest)
    got = [count for count in counts if count[1]]
    return Pulled(len(got), sum(c for c, _ in got), sum(b for _, b in got))


def fetch_tree(fleet: FleetStore, tenant: str, ref: PartRef) -> Tree:
    """The list of files of a volume, without its packs.

    Raises:
        StorageError: it is not in the bucket.
        CheckpointError: it is damaged.
    """
    data = fleet.bucket.get(documents.tree_key(tenant, ref))
    if data is None:
        raise missing(f"The list of files {ref.digest[:16]}", fleet.bucket.url)
    return parse_tree(ref, data, fleet.hasher(tenant))


def _parts_document(fleet: FleetStore, tenant: str, parts: NodeParts) -> PartsDocument:
    document = documents.read(fleet.bucket, documents.parts_key(tenant, parts), PartsDocument)
    if document is None:
        raise missing(f"What node {parts.node} has written of the checkpoint", fleet.bucket.url)
    return document


def _await_sweep(fleet: FleetStore, tenant: str, packs: Sequence[PackSize]) -> None:
    """Waits while some of these packs may be on their way out; see `garbage`."""
    mine = {documents.pack_key(tenant, pack) for pack, _ in packs}
    for attempt in stamina.retry_context(
        on=_BeingRemovedError, attempts=None, timeout=2 * SWEEP_LIMIT_S, wait_initial=0.05, wait_max=1.0
    ):
        with attempt:
            sweep = documents.read(fleet.bucket, documents.condemned_key(tenant), Condemned)
            if sweep is not None and mine & set(sweep.keys):
                raise _BeingRemovedError(
                    f"Packs of tenant {tenant} are being removed from {fleet.bucket.url}.",
                    code=BUSY,
                    remedy="Repeat the call in a minute.",
                )


class _BeingRemovedError(StorageError):
    pass
