"""Snapshots of a cluster's state in the fleet's store, by digest, with an index by tick.

    clusters/CLUSTER/snapshots/DIGEST.json.zst        canonical bytes of a `ClusterState`
    clusters/CLUSTER/ticks/<tick, 20 digits>.json     {"digest": the snapshot after the tick, "base": before its plan}

The index names the newest snapshot where the workflow's own digest is lost (its workflow was terminated, or somebody
has cleaned up), and the old ones that may be removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import orjson
import structlog

from model.errors import ModelError
from proxy_runtime.errors import ErgoError
from scheduling.state import ClusterState, digest_of

KEEP_TICKS = 10_000
"""So many ticks can be recomputed by an audit; at one tick in five seconds this is half a day of constant change."""

KEEP_BYTES = 2 << 30
"""Fewer ticks are kept where their snapshots are larger than this together: the two of a tick are about 0.6 MB with
1,000 nodes and 5,000 jobs."""

_PRUNE_EVERY = 100
_CACHED = 4
_MISSING = "storage.missing"

_log = structlog.stdlib.get_logger(__name__)


class SnapshotBucket(Protocol):
    """The part of `proxy_runtime.storage.blobs.Bucket` that is needed."""

    def get(self, key: str) -> bytes | None:
        """An object's bytes; None where there is none."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Writes an object."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`."""
        ...

    def find(self, prefix: str) -> Sequence[tuple[str, int, float]]:
        """The same with sizes in bytes, and times."""
        ...

    def delete(self, key: str) -> None:
        """Removes an object; none there is success."""
        ...


class SnapshotStore(Protocol):
    """The part of `proxy_runtime.storage.fleet.FleetStore` that is needed."""

    @property
    def bucket(self) -> SnapshotBucket:
        """Where all of it is."""
        ...

    def put_snapshot(self, cluster: str, digest: str, data: bytes) -> None:
        """Writes a snapshot."""
        ...

    def get_snapshot(self, cluster: str, digest: str) -> bytes:
        """Reads a snapshot; an error where there is none."""
        ...

    def delete_snapshot(self, cluster: str, digest: str) -> None:
        """Removes a snapshot; none there is success."""
        ...


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Reads and writes the states of one cluster. Blocking; threads may share one."""

    store: SnapshotStore
    cluster: str
    _cache: dict[str, ClusterState] = field(default_factory=dict[str, ClusterState])
    """The last ones, by digest. A state of a large cluster takes longer to read than to plan on."""

    def read(self, digest: str) -> ClusterState | None:
        """The state of that name; None where it is gone or damaged.

        Raises:
            ErgoError: the store cannot be reached.
        """
        known = self._cache.get(digest)
        if known is not None:
            return known
        try:
            data = self.store.get_snapshot(self.cluster, digest)
        except ErgoError as error:
            if error.code == _MISSING:
                return None
            raise
        if digest_of(data) != digest:
            return None
        try:
            state = ClusterState.from_json(data)
        except ModelError as error:
            _log.warning("a snapshot is not read", cluster=self.cluster, digest=digest, error=str(error)[:500])
            return None  # of another build; jobs and nodes will tell everything again
        self._keep(digest, state)
        return state

    def newest(self) -> ClusterState | None:
        """The newest state that can be read; None where there is none."""
        for key in reversed(self._ticks()):
            names = self._names(key)
            state = self.read(names.get("digest", ""))
            if state is not None:
                return state
        return None

    def write(self, base: bytes, after: ClusterState) -> str:
        """Writes the state before a plan (which directives name), by its canonical bytes, and the one after it.

        Returns:
            The digest of the latter.
        """
        data = after.to_json()
        digest, base_digest = digest_of(data), digest_of(base)
        if base_digest != digest:
            self.store.put_snapshot(self.cluster, base_digest, base)
        self.store.put_snapshot(self.cluster, digest, data)
        self._keep(digest, after)
        names = orjson.dumps({"digest": digest, "base": base_digest})
        self.store.bucket.put(f"clusters/{self.cluster}/ticks/{after.tick:020d}.json", names)
        if after.tick % _PRUNE_EVERY == 0:
            self.prune()
        return digest

    def prune(self, keep: int = KEEP_TICKS, keep_bytes: int = KEEP_BYTES) -> None:
        """Removes snapshots of all but the newest `keep` ticks, and of more where all are larger than `keep_bytes`."""
        ticks = self._ticks()
        if not ticks:
            return
        size = sum(found[1] for found in self.store.bucket.find(f"clusters/{self.cluster}/snapshots/"))
        keep = max(1, min(keep, keep_bytes * len(ticks) // max(size, 1)))
        kept = {digest for key in ticks[-keep:] for digest in self._names(key).values()}
        for key in ticks[:-keep]:
            for digest in self._names(key).values():
                if digest not in kept:
                    self.store.delete_snapshot(self.cluster, digest)
            self.store.bucket.delete(key)

    def _keep(self, digest: str, state: ClusterState) -> None:
        self._cache[digest] = state
        for old in list(self._cache)[:-_CACHED]:
            self._cache.pop(old, None)

    def _ticks(self) -> list[str]:
        return sorted(self.store.bucket.list(f"clusters/{self.cluster}/ticks/"))

    def _names(self, key: str) -> dict[str, str]:
        try:
            return orjson.loads(self.store.bucket.get(key) or b"{}")
        except orjson.JSONDecodeError:
            return {}
