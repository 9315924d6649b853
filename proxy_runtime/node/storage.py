"""Checkpoints of a node: its own store, the fleet's, and other nodes' peers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from model.ids import CheckpointId, Epoch, JobId, NodeId, TenantId
from model.manifest import Manifest
from model.runtime import NodeParts, TransferInput, TransferResult
from proxy_runtime.checkpoint.store import Store
from proxy_runtime.node.errors import NodeError, unknown
from proxy_runtime.shim.part import PartWritten
from proxy_runtime.storage.fleet import FleetStore


class Storage:
    """What a node reads and writes of checkpoints and volumes. Thread-safe.

    Args:
        fleet: the fleet's store.
        directory: the node's own.
        node: this node.
    """

    def __init__(self, fleet: FleetStore, directory: Path, node: NodeId) -> None:
        self.fleet = fleet
        self._directory = directory
        self._node = node
        self._lock = threading.Lock()
        self._stores: dict[TenantId, Store] = {}
        self._pulled: dict[tuple[JobId, Epoch], int] = {}

    def store(self, tenant: TenantId) -> Store:
        """The node's share of a tenant; made with the tenant's key of the fleet."""
        with self._lock:
            if tenant not in self._stores:
                key = self.fleet.tenant_key(tenant)
                self._stores[tenant] = Store.open(self._directory, tenant, key=key)
            return self._stores[tenant]

    def address(self, node: NodeId) -> str | None:
        """Where a node's agent listens, if the node is there."""
        record = self.fleet.node(node.name)
        return record.address if record is not None and record.node == node and not record.left else None

    def fabric_token(self, tenant: TenantId, job: JobId, epoch: Epoch) -> str:
        """The secret by which device proxies of a job know each other: the same on all its nodes, in no message."""
        return blake3(f"fabric/{job}/{int(epoch)}".encode(), key=self.fleet.tenant_key(tenant)).hexdigest()
