"""Checkpoints of a node: its own store, the fleet's, and other nodes' peers."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from pathlib import Path

from blake3 import blake3

from model.ids import CheckpointId, Epoch, JobId, NodeId, TenantId
from model.manifest import Manifest
from model.runtime import NodeParts, TransferInput, TransferResult
from proxy_runtime.checkpoint.store import Store
from proxy_runtime.shim.part import PartWritten
from proxy_runtime.storage import checkpoints, sources, volumes
from proxy_runtime.storage.fleet import FleetStore
from proxy_runtime.storage.garbage import MIN_AGE_S

_NOBODY = JobId("nobody")
"""In a store without checkpoints there are packs to be removed too."""


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

    def push(self, tenant: TenantId, written: PartWritten) -> NodeParts:
        """Puts what this node has written of a checkpoint into the fleet's store; the parts, as a commit names them."""
        parts = written.parts
        checkpoints.push(self.fleet, self.store(tenant), parts, written.packs, stored_bytes=written.stored_bytes)
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
        return TransferResult(pulled.chunks, pulled.bytes, {"pull": (time.perf_counter() - began) * 1e3})

    def tidy(self, here: Collection[JobId], *, min_age_s: float = MIN_AGE_S) -> None:
        """Removes what came long ago and is of no use to the jobs that are here; the fleet's store has what counts.

        Args:
            here: jobs that have a part on this node: their newest checkpoints stay.
            min_age_s: what came or was used within so many seconds stays.

        Raises:
            ErgoError: a store does not answer, or is damaged.
        """
        for path in sorted((self._directory / "tenants").glob("*")):
            exchange = self.store(TenantId(path.name)).exchange
            kept: dict[JobId, tuple[CheckpointId, ...]] = {_NOBODY: (), **dict.fromkeys(exchange.jobs(), ())}
            for job in kept.keys() & set(here):
                head = self.fleet.head(job)
                kept[job] = () if head is None or head.checkpoint is None else (head.checkpoint,)
            for job, checkpoints_ in kept.items():
                exchange.retain(job, checkpoints_, min_age_s, time.time())

    def pulled(self, job: JobId, epoch: Epoch) -> int:
        """Bytes that a transfer under way has brought."""
        return self._pulled.get((job, epoch), 0)
