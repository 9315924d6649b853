"""Making a checkpoint of what all nodes of a job have written, and making it count."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from model.ids import CheckpointId, Step
from model.manifest import ManifestHeader, NumericsClass, PartRef, RankState
from model.runtime import CheckpointInput, CheckpointResult, NodeParts
from proxy_runtime.checkpoint.merkle import CHUNK_REF
from proxy_runtime.checkpoint.parts import Part
from proxy_runtime.checkpoint.store import Store
from proxy_runtime.node.clock import Clock
from proxy_runtime.node.launch import network_of
from proxy_runtime.node.ledger import PartRecord
from proxy_runtime.shim.header import host_class
from proxy_runtime.storage import checkpoints
from proxy_runtime.storage.documents import PackSize
from proxy_runtime.storage.fleet import FleetStore
from proxy_runtime.storage.volume_merge import merge

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Committer:
    """Commits checkpoints of one part's job, on the node of its first rank.

    Attributes:
        fleet: the fleet's store.
        store: this node's share of the tenant.
        record: the part.
        numerics: class of the node's devices.
    """

    fleet: FleetStore
    store: Store
    record: PartRecord
    numerics: NumericsClass

    def commit(self, request: CheckpointInput) -> CheckpointResult:
        """See `model.runtime.CheckpointInput`. Idempotent: the same parts make the same checkpoint.

        Raises:
            Fenced: another epoch counts.
            ErgoError: parts are missing in the fleet's store, or it does not answer.
        """
        clock = Clock()
        record, parts = self.record, request.commit or ()
        header = self._header(parts, request.parent)
        volume, packs = self._join(parts)
        clock.lap("merge")
        manifest = checkpoints.assemble(
            self.fleet, self.store, record.job, record.epoch, header, parts, volume=volume, volume_packs=packs
        )
        step = Step(min((rank.step for rank in header.ranks), default=0))
        if request.kind == "final":
            self.fleet.commit_final(record.job, record.epoch, manifest.root)
        else:
            self.fleet.commit_checkpoint(record.job, record.epoch, manifest.root, step)
        clock.lap("commit")
        self._retain()
        refs = [ref for rank in manifest.ranks for ref in (rank.process, rank.device)] + [manifest.volume]
        return CheckpointResult(
            checkpoint=manifest.root,
            stored_bytes=manifest.stored_bytes,
            total_bytes=sum(ref.bytes for ref in refs if ref is not None),
            timings_ms=clock.laps,
        )

    def _header(self, parts: Sequence[NodeParts], parent: CheckpointId | None) -> ManifestHeader:
        record = self.record
        states = {state.rank: state for each in parts for state in each.states}
        placement = record.placement
        return ManifestHeader(
            world_size=placement.world_size,
            placement=tuple(str(placement.device(rank)) for rank in range(placement.world_size)),
            argv=record.argv,
            cwd=record.cwd,
            env=record.env,
            network=network_of(record.spec),
            build_id=record.build_id,
            numerics=self.numerics,
            host=host_class(),
            created_at_ns=time.time_ns(),
            ranks=tuple(states.get(rank) or RankState(rank=rank, step=Step(0)) for rank in range(placement.world_size)),
            parent=parent,
        )

    def _join(self, parts: Sequence[NodeParts]) -> tuple[PartRef | None, Sequence[PackSize]]:
        """One volume of those of all nodes, and the packs of its list of files, which are in the fleet's store."""
        tenant, job = self.store.tenant, self.record.job
        refs = {str(part.node): part.volume for part in parts if part.volume is not None}
        if len({ref.digest for ref in refs.values()}) < 2:
            return None, ()
        base = None if self.record.base is None else checkpoints.fetch_tree(self.fleet, tenant, self.record.base)
        trees = {node: checkpoints.fetch_tree(self.fleet, tenant, ref) for node, ref in refs.items()}
        merged = merge(base, trees)
        for warning in merged.warnings:
            _log.warning("volumes of nodes differ", job=str(job), what=warning)
        with self.store.begin(job, self.record.epoch) as writer:
            for entry in merged.tree.entries:
                writer.add_entry(Part.volume(), entry, list(CHUNK_REF.iter_unpack(base64.b64decode(entry.chunks))))
            written = writer.finish_parts()
        volume = written.volume
        assert volume is not None
        # As if this node had written the whole: a later commit merges against it, and nothing of it is garbage.
        whole = NodeParts(node=parts[0].node, ranks=(), states=(), volume=volume)
        packs = self.store.exchange.packs_of(volume)
        sizes = [(pack, self.store.exchange.path(pack).stat().st_size) for pack in packs]
        checkpoints.push(self.fleet, self.store, whole, packs)
        return volume, sizes

    def _retain(self) -> None:
        """Keeps the newest checkpoints of the job; what goes wrong with that harms nobody now."""
