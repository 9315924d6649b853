"""The fleet's store: one bucket and one secret, which all nodes, workers and commands of a fleet share."""

from __future__ import annotations

from pathlib import Path

import zstandard
from blake3 import blake3

from model.control import (
    AdvanceHeadInput,
    AdvanceHeadResult,
    AllocateEpochInput,
    AllocateEpochResult,
    OpenJobInput,
    OpenJobResult,
)
from model.ids import CheckpointId, Epoch, Generation, NodeId, Step
from model.records import JobHead, NodeRecord
from proxy_runtime.checkpoint import Store
from proxy_runtime.checkpoint.merkle import Hasher
from proxy_runtime.storage.blobs import Bucket
from proxy_runtime.storage.errors import KEY, StorageError, missing
from proxy_runtime.storage.heads import Heads
from proxy_runtime.storage.nodes import Nodes

SECRET_BYTES = 32

_PACKED = ".zst"
_LEVEL = 1  # a fourteenth of the bytes in 10 ms for 5 MB; higher levels gain little


class FleetStore:
    """What a fleet remembers. Thread-safe; calls block. See design record 0002.

    Args:
        bucket: where it is.
        secret: 32 bytes; every tenant's chunk key and the peers' token are derived from it.

    Attributes:
        heads: the heads of jobs; its operations are methods here too.
    """

    def __init__(self, bucket: Bucket, secret: bytes) -> None:
        if len(secret) != SECRET_BYTES:
            raise StorageError(
                f"A fleet's secret has {SECRET_BYTES} bytes, this one {len(secret)}.",
                code=KEY,
                remedy="Use the file that the fleet was set up with.",
            )
        self.bucket = bucket
        self._secret = secret
        self.heads = Heads(bucket)
        self._nodes = Nodes(bucket)

    # -- keys --------------------------------------------------------------------------------------------------

    def tenant_key(self, tenant: str) -> bytes:
        """The key of a tenant's chunk ids: 32 bytes, the same on every node of the fleet."""
        return blake3(self._secret + tenant.encode(), derive_key_context="ergosphere fleet tenant key v1").digest()

    def hasher(self, tenant: str) -> Hasher:
        """All hashes of a tenant."""
        return Hasher(self.tenant_key(tenant))

    @property
    def peer_token(self) -> str:
        """What nodes show one another, as a bearer token."""
        return blake3(self._secret, derive_key_context="ergosphere fleet peer token v1").hexdigest()

    def node_store(self, path: Path, tenant: str) -> Store:
        """Opens a node's own chunk store with the tenant's key.

        Raises:
            CheckpointError: it belongs to another fleet, is damaged or cannot be made.
        """
        return Store.open(path, tenant, key=self.tenant_key(tenant))

    # -- heads of jobs -----------------------------------------------------------------------------------------

    def open_job(self, input: OpenJobInput) -> OpenJobResult:
        """Gives the generation to a run of a job's workflow. Raises `Fenced` where another one has taken it since."""
        return self.heads.open_job(input)

    def allocate_epoch(self, input: AllocateEpochInput) -> AllocateEpochResult:
        """Hands out an epoch that nobody has had. Raises `Fenced` where another run holds the generation."""
        return self.heads.allocate_epoch(input)

    def advance_head(self, input: AdvanceHeadInput) -> AdvanceHeadResult:
        """Makes an epoch the one that counts. Raises `Fenced` where a higher one does, or another run holds it."""
        return self.heads.advance_head(input)

    def commit_checkpoint(self, job: str, epoch: Epoch, checkpoint: CheckpointId, step: Step) -> None:
        """Makes a checkpoint the newest of its job. Raises `Fenced` unless the epoch is the one that counts."""
        self.heads.commit_checkpoint(job, epoch, checkpoint, step)

    def commit_final(self, job: str, epoch: Epoch, checkpoint: CheckpointId) -> None:
        """Notes the volume of a job that has ended. Raises `Fenced` unless the epoch is the one that counts."""
        self.heads.commit_final(job, epoch, checkpoint)

    def holds_generation(self, job: str, workflow_run: str, generation: Generation) -> bool:
        """Whether a run may publish events of a generation."""
        return self.heads.holds_generation(job, workflow_run, generation)

    def tenants(self) -> list[str]:
        """Those who have jobs, sorted."""
        return sorted({str(head.tenant) for head in self.heads.read_all()})

    def head(self, job: str) -> JobHead | None:
        """A job's head; None before it was opened."""
        return self.heads.read(job)

    # -- nodes -------------------------------------------------------------------------------------------------

    def claim_node(self, record: NodeRecord) -> NodeRecord:
        """Takes a node's name over under its next incarnation."""
        return self._nodes.claim(record)

    def renew_node(self, record: NodeRecord) -> NodeRecord:
        """Renews a lease. Raises `Fenced` where a higher incarnation is there, or this one was given up."""
        return self._nodes.renew(record)

    def mark_lost(self, node: NodeId) -> None:
        """Gives an incarnation of a node up."""
        self._nodes.mark_lost(node)

    def nodes(self) -> list[NodeRecord]:
        """All nodes, by name."""
        return self._nodes.read_all()

    def node(self, name: str) -> NodeRecord | None:
        """A node, under whatever incarnation it is now; None where it never was."""
        return self._nodes.read(name)

    # -- snapshots of schedulers -------------------------------------------------------------------------------

    def put_snapshot(self, cluster: str, digest: str, data: bytes) -> None:
        """Writes a scheduler's snapshot."""
        self.bucket.put(_snapshot(cluster, digest), zstandard.compress(data, _LEVEL))

    def get_snapshot(self, cluster: str, digest: str) -> bytes:
        """Reads a scheduler's snapshot.

        Raises:
            StorageError: there is none (``storage.missing``), or the store does not answer.
        """
        name = _snapshot(cluster, digest)
        data = self.bucket.get(name)
        if data is None:
            data = self.bucket.get(name.removesuffix(_PACKED))  # of a build that did not compress them
        if data is None:
            raise missing(f"Snapshot {digest} of cluster {cluster}", self.bucket.url)
        try:
            return zstandard.decompress(data) if data.startswith(zstandard.FRAME_HEADER) else data
        except zstandard.ZstdError:
            return data  # damaged: its digest is another one

    def delete_snapshot(self, cluster: str, digest: str) -> None:
        """Removes a scheduler's snapshot; none there is success."""
        name = _snapshot(cluster, digest)
        self.bucket.delete(name)
        self.bucket.delete(name.removesuffix(_PACKED))


def _snapshot(cluster: str, digest: str) -> str:
    return f"clusters/{cluster}/snapshots/{digest}.json{_PACKED}"
