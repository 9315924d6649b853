"""Which pack holds which chunk: the indexes of all packs of a tenant, in memory, read when first needed."""

from __future__ import annotations

import threading
from pathlib import Path

from proxy_runtime.checkpoint.errors import CheckpointError
from proxy_runtime.checkpoint.files import PRIVATE_FILE
from proxy_runtime.checkpoint.merkle import Hasher
from proxy_runtime.checkpoint.pack import SUFFIX, SUSPECT_SUFFIX, Entries, Location, read_index


class ChunkIndex:
    """Chunks by id. Thread-safe.

    A pack whose index is damaged is left out and remembered: new checkpoints do not build on it, and a reader
    that misses one of its chunks says what is wrong with it. A pack in which a reader found a damaged chunk is a
    suspect: it is still read, but new checkpoints store their chunks anew, which heals the old ones too.
    """

    def __init__(self, folder: Path, hasher: Hasher) -> None:
        self._folder = folder
        self._hasher = hasher
        self._lock = threading.Lock()
        self._chunks: Entries = {}
        self._packs: set[str] = set()
        self._suspects: set[str] = set()
        self.broken: dict[str, CheckpointError] = {}

    def refresh(self) -> None:
        """Takes in packs that came and forgets packs that went since the last call."""
        with self._lock:
            present = {path.stem for path in self._folder.glob("*" + SUFFIX)}
            suspects = {path.stem for path in self._folder.glob("*" + SUSPECT_SUFFIX)}
            chunks, packs = self._chunks, self._packs
            if packs - present or suspects != self._suspects:
                # Start over: a chunk may have a second home. Aside, as others are reading what is there.
                chunks, packs = {}, set()
            broken = {p: e for p, e in self.broken.items() if p in present}
            # Suspects first, so that a chunk that has a second home is found there.
            for pack in sorted(present - packs - broken.keys(), key=lambda p: (p not in suspects, p)):
                try:
                    chunks.update(read_index(self.path(pack), self._hasher))
                    packs.add(pack)
                except CheckpointError as error:
                    broken[pack] = error
            self._chunks, self._packs, self._suspects, self.broken = chunks, packs, suspects, broken

    def get(self, chunk: bytes) -> Location | None:
        """Where a chunk lies, or None."""
        found = self._chunks.get(chunk)
        return None if found is None else Location._make(found)

    def reusable(self, chunk: bytes) -> Location | None:
        """Where a chunk lies that a new checkpoint may build on, or None."""
        at = self.get(chunk)
        return None if at is None or at.pack in self._suspects else at

    def suspect(self, pack: str) -> None:
        """Remembers, for other processes too if the directory can be written, that a pack holds a damaged chunk."""
        self._suspects.add(pack)
        try:
            self._folder.joinpath(pack + SUSPECT_SUFFIX).touch(mode=PRIVATE_FILE)
        except OSError:
            pass  # a read-only copy: nobody writes new checkpoints there either

    def add(self, pack: str, entries: Entries) -> None:
        """Takes in a pack that this process sealed."""
        with self._lock:
            self._chunks.update(entries)
            self._packs.add(pack)
            self.broken.pop(pack, None)  # it has just been written anew

    def packs(self) -> dict[str, list[tuple[bytes, Location]]]:
        """All chunks, by pack."""
        with self._lock:
            by_pack: dict[str, list[tuple[bytes, Location]]] = {pack: [] for pack in self._packs}
            for chunk, at in self._chunks.items():
                by_pack[at[0]].append((chunk, Location._make(at)))
            return by_pack

    def path(self, pack: str) -> Path:
        """File of a pack."""
        return self._folder / (pack + SUFFIX)
