"""Which pack holds which chunk: the indexes of all packs of a tenant, in memory, read when first needed."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

from proxy_runtime.checkpoint.errors import CheckpointError
from proxy_runtime.checkpoint.merkle import Hasher
from proxy_runtime.checkpoint.pack import SUFFIX, Location, read_index


class ChunkIndex:
    """Chunks by id. Thread-safe.

    A pack whose index is damaged is left out and remembered: new checkpoints do not build on it, and a reader
    that misses one of its chunks says what is wrong with it.
    """

    def __init__(self, folder: Path, hasher: Hasher) -> None:
        self._folder = folder
        self._hasher = hasher
        self._lock = threading.Lock()
        self._chunks: dict[bytes, Location] = {}
        self._packs: set[str] = set()
        self.broken: dict[str, CheckpointError] = {}

    def refresh(self) -> None:
        """Takes in packs that came and forgets packs that went since the last call."""
        with self._lock:
            present = {path.stem for path in self._folder.glob("*" + SUFFIX)}
            if self._packs - present:  # start over: a chunk of a pack that went may have a second home
                self._chunks, self._packs = {}, set()
            self.broken = {p: e for p, e in self.broken.items() if p in present}
            for pack in sorted(present - self._packs - self.broken.keys()):
                try:
                    self._chunks.update(read_index(self._folder / (pack + SUFFIX), self._hasher))
                    self._packs.add(pack)
                except CheckpointError as error:
                    self.broken[pack] = error

    def get(self, chunk: bytes) -> Location | None:
        """Where a chunk lies, or None."""
        return self._chunks.get(chunk)

    def add(self, pack: str, entries: Iterable[tuple[bytes, Location]]) -> None:
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
                by_pack[at.pack].append((chunk, at))
            return by_pack

    def path(self, pack: str) -> Path:
        """File of a pack."""
        return self._folder / (pack + SUFFIX)
