"""Making a checkpoint of what all nodes of a job have written, and making it count."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from model.ids import CheckpointId, Step
from model.manifest import ManifestHeader, NumericsClass, RankParts, RankState, Tree, why_over
from model.runtime import CheckpointInput, CheckpointResult, NodeParts, RuntimeCode
from proxy_runtime.checkpoint.store import Store
from proxy_runtime.errors import ErgoError
from proxy_runtime.node.clock import Clock
from proxy_runtime.node.errors import NodeError
from proxy_runtime.node.launch import device_of_rank, network_of
from proxy_runtime.node.ledger import PartRecord
from proxy_runtime.shim.header import host_class
from proxy_runtime.storage import checkpoints, garbage, volumes
from proxy_runtime.storage.fleet import FleetStore

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Committer:
    """Commits checkpoints of one part's job, on the node of its first rank.

    Attributes:
        fleet: the fleet's store.
        store: this node's share of the tenant.
        record: the part.
        numerics: class of the node's devices.
        base: files of the volume that the epoch began with; None where it began with nothing.
    """

    fleet: FleetStore
    store: Store
    record: PartRecord
    numerics: NumericsClass
    base: Tree | None

    def commit(self, request: CheckpointInput) -> CheckpointResult:
        """See `model.runtime.CheckpointInput`. Idempotent: the same parts make the same checkpoint.

        Raises:
            Fenced: another epoch counts.
            NodeError: a rank has no process and has not exited with 0; one that is only kept (``final``) may have any,
                and of what leaves its nodes (``leaving``) only that part is there.
            ErgoError: parts are missing in the fleet's store, or it does not answer.
        """
        clock = Clock()
        record, parts = self.record, request.commit or ()
        if request.kind not in ("final", "leaving"):
            self._require_going_on(parts)
        header = self._header(parts, request.parent)
        volume, _ = volumes.join_volumes(self.fleet, self.store, record.job, record.epoch, self.base, parts)
        clock.lap("merge")
        manifest = checkpoints.assemble(self.fleet, self.store, record.job, record.epoch, header, parts, volume=volume)
        step = min(header.steps)
        if request.kind == "final":
            self.fleet.commit_final(record.job, record.epoch, manifest.root)
        elif request.kind != "leaving":  # that is a way from node to node, and nothing that one could go back to
            self.fleet.commit_checkpoint(record.job, record.epoch, manifest.root, step)
        clock.lap("commit")
        if request.kind != "leaving":
            # The job may stand still for this commit, and whoever reads the store can hold up its cleaning.
            threading.Thread(target=self._retain, args=(parts, volume), name="retain", daemon=True).start()
        refs = [ref for rank in manifest.ranks for ref in (rank.process, rank.device)] + [manifest.volume]
        return CheckpointResult(
            checkpoint=manifest.root,
            stored_bytes=manifest.stored_bytes,
            total_bytes=sum(ref.bytes for ref in refs if ref is not None),
            timings_ms=clock.laps,
        )

    def _require_going_on(self, parts: Sequence[NodeParts]) -> None:
        record = self.record
        there = {rank.rank: rank for each in parts for rank in each.ranks}
        ranks = [there.get(rank) or RankParts(rank=rank) for rank in range(len(device_of_rank(record)))]
        if why := why_over(ranks, record.spec.pack):
            raise NodeError(
                f"A checkpoint of job {record.job} is not committed: {why}.",
                code=RuntimeCode.UNKNOWN,
                remedy="Go back to its newest checkpoint.",
            )

    def _header(self, parts: Sequence[NodeParts], parent: CheckpointId | None) -> ManifestHeader:
        record = self.record
        states = {state.rank: state for each in parts for state in each.states}
        placed = device_of_rank(record)
        return ManifestHeader(
            world_size=len(placed),
            placement=tuple(str(record.placement.devices[index]) for index in placed),
            argv=record.argv,
            cwd=record.cwd,
            env=record.env,
            network=network_of(record.spec),
            pack=record.spec.pack,
            build_id=record.build_id,
            numerics=self.numerics,
            host=host_class(),
            created_at_ns=time.time_ns(),
            ranks=tuple(states.get(rank) or RankState(rank=rank, step=Step(0)) for rank in range(len(placed))),
            parent=parent,
        )

    def _retain(self, parts: Sequence[NodeParts], volume: NodeParts | None) -> None:
        """Keeps the newest checkpoints of the job; what goes wrong with that harms nobody now."""
        try:
            checkpoints.settle(self.fleet, self.store.tenant, [*parts, *([volume] if volume is not None else [])])
            garbage.retain(self.fleet, self.record.job, self.record.spec.checkpoint.keep, store=self.store)
        except ErgoError as error:
            _log.warning("old checkpoints were not removed", job=str(self.record.job), error=str(error))
