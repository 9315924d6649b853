"""Checkpoints of a node: its own store, the fleet's, and other nodes' peers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from blake3 import blake3

from model.ids import CheckpointId, Epoch, JobId, NodeId, TenantId
from model.manifest import Manifest
from model.runtime import NodeParts, TransferInput, TransferResult
from proxy_runtime.checkpoint.exchange import SETTLED_S
from proxy_runtime.checkpoint.files import free_bytes
from proxy_runtime.checkpoint.store import Store
from proxy_runtime.shim.part import PartWritten
from proxy_runtime.storage import checkpoints, garbage, sources, volumes
from proxy_runtime.storage.errors import FULL, StorageError
from proxy_runtime.storage.fleet import FleetStore
from proxy_runtime.storage.garbage import MIN_AGE_S, RETAIN_AGE_S


class Storage:
    """What a node reads and writes of checkpoints and volumes. Thread-safe.

    Args:
        fleet: the fleet's store.
        directory: the node's own.
    """

    def __init__(self, fleet: FleetStore, directory: Path) -> None:
        self.fleet = fleet
        self._directory = directory
        self._lock = threading.Lock()
        self._stores: dict[TenantId, Store] = {}
        self._pulled: dict[tuple[JobId, Epoch], int] = {}
        self._brought: dict[JobId, tuple[CheckpointId, float]] = {}

    @property
    def token(self) -> str:
        """What nodes show one another."""
        return self.fleet.peer_token

    def store(self, tenant: TenantId) -> Store:
        """The node's share of a tenant; made with the tenant's key of the fleet."""
        with self._lock:
            if tenant not in self._stores:
                self._stores[tenant] = self.fleet.node_store(self._directory, tenant)
            return self._stores[tenant]

    def address(self, node: NodeId) -> str | None:
        """Where a node's agent listens, if the node is there."""
        record = self.fleet.node(node.name)
        return record.address if record is not None and record.node == node and not record.left else None

    def fabric_token(self, tenant: TenantId, job: JobId, epoch: Epoch) -> str:
        """The secret by which device proxies of a job know each other: the same on all its nodes, in no message."""
        return blake3(f"fabric/{job}/{int(epoch)}".encode(), key=self.fleet.tenant_key(tenant)).hexdigest()

    def materialize(self, tenant: TenantId, manifest: CheckpointId, dest: Path) -> None:
        """Brings an uploaded directory into a missing one."""
        volumes.materialize(self.fleet, tenant, manifest, dest)

    def manifest(self, tenant: TenantId, job: JobId, checkpoint: CheckpointId) -> Manifest:
        """A checkpoint's manifest, as a transfer has brought it."""
        return self.store(tenant).read(checkpoint, job).manifest

    def push(self, tenant: TenantId, written: PartWritten, of: tuple[JobId, Epoch]) -> NodeParts:
        """Puts what this node has written of a checkpoint into the fleet's store; the parts, as a commit names them."""
        parts, stored = written.parts, written.stored_bytes
        checkpoints.push(self.fleet, self.store(tenant), parts, written.packs, of=of, stored_bytes=stored)
        return parts

    def pull(self, request: TransferInput) -> TransferResult:
        """Brings what is missing of a checkpoint, each pack from the first source that has it."""
        began = time.perf_counter()
        key = (request.job, request.epoch)

        def progress(done: int, _total: int) -> None:
            self._pulled[key] = done

        try:
            pulled = checkpoints.pull(
                self.fleet,
                self.store(request.tenant),
                request.checkpoint,
                sources.resolve(self.fleet, request.sources),
                ranks=request.ranks,
                progress=progress,
                deadline_s=request.deadline_s,
            )
        finally:
            self._pulled.pop(key, None)
        self._brought[request.job] = request.checkpoint, time.monotonic()
        return TransferResult(pulled.chunks, pulled.bytes, {"pull": (time.perf_counter() - began) * 1e3})

    def tidy(
        self,
        here: Collection[JobId],
        *,
        has_ended: Callable[[JobId], bool] = lambda _job: False,
        min_age_s: float = RETAIN_AGE_S,
    ) -> int:
        """Removes what is of no use to the jobs that are here; the fleet's store has what counts.

        Args:
            here: jobs that have a part on this node: their newest checkpoints stay.
            has_ended: whether a job that is not here has ended for good: what only it needs goes at once.
            min_age_s: what came or was used within so many seconds stays: a write that is to be pushed, or what was
                pulled. For a restore that has not begun it stays longer.

        Returns:
            Bytes removed.

        Raises:
            ErgoError: a store does not answer, or is damaged.
        """
        size = 0
        for job, (_, at) in list(self._brought.items()):
            if at < time.monotonic() - MIN_AGE_S:
                self._brought.pop(job, None)
        for path in sorted((self._directory / "tenants").glob("*")):
            exchange = self.store(TenantId(path.name)).exchange
            keep: dict[JobId, tuple[CheckpointId, ...]] = dict.fromkeys(exchange.jobs(), ())
            for job in keep.keys() & set(here):
                head = self.fleet.head(job)
                keep[job] = () if head is None or head.checkpoint is None else (head.checkpoint,)
            over = [job for job in keep if job not in here and has_ended(job)]
            for job in keep.keys() - set(here) - set(over):  # other nodes of the job may still be pulling theirs
                if job in self._brought:
                    keep[job] = (self._brought[job][0],)
            size += exchange.retain(keep, min_age_s, time.time(), over=over)[1]
        return size

    def make_room(self, here: Collection[JobId], needed: int) -> None:
        """Sees to it that a checkpoint is not begun where the disk would be full before it is whole.

        Args:
            here: jobs that have a part on this node.
            needed: bytes that must be free, here and, where it is a directory, in the fleet's store.

        Raises:
            StorageError: ``storage.full``: fewer are, although all that nobody needs has been removed.
        """
        if self._short_of(needed) is None:
            return
        self.tidy(here, min_age_s=SETTLED_S)
        for tenant in self.fleet.tenants():
            garbage.sweep(self.fleet, tenant)
        if (short := self._short_of(needed)) is not None:
            raise StorageError(
                f"No checkpoint is begun: {short[0]} has {short[1] / 2**30:.2f} GiB free, less than the "
                f"{needed / 2**30:.2f} GiB that have to stay free.",
                code=FULL,
                remedy="Free disk space there, or set ERGO_FREE_BYTES for the fleet; the job runs on.",
            )

    def _short_of(self, needed: int) -> tuple[str, int] | None:
        """Where fewer bytes are free, and how many."""
        self._directory.mkdir(parents=True, exist_ok=True)
        places = {
            str(self._directory): free_bytes(self._directory),
            self.fleet.bucket.url: self.fleet.bucket.free_bytes(),
        }
        return next(((place, free) for place, free in places.items() if free is not None and free < needed), None)

    def pulled(self, job: JobId, epoch: Epoch) -> int:
        """Bytes that a transfer under way has brought."""
        return self._pulled.get((job, epoch), 0)
