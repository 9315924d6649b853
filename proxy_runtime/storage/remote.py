"""Reading some files out of packs in the bucket, without bringing whole packs here."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import zstandard

from model.manifest import TreeEntry
from proxy_runtime.checkpoint.errors import damaged
from proxy_runtime.checkpoint.merkle import CHUNK_REF, ZERO_ID, Hasher
from proxy_runtime.checkpoint.pack import TRAILER_BYTES, Entries, Location, parse_tail, tail_bytes
from proxy_runtime.storage import documents
from proxy_runtime.storage.blobs import Bucket
from proxy_runtime.storage.documents import PackSize
from proxy_runtime.storage.errors import from_os_error, missing
from proxy_runtime.storage.transfers import Meter, Progress, each

_TAIL_GUESS = 128 << 10
_RUN_BYTES = 8 << 20
_GAP_BYTES = 128 << 10
"""Fetching this much too much costs less than another request."""


P = TypeVar("P")


class Place(NamedTuple):
    """Where a chunk goes: a file, and the offset there."""

    path: Path
    offset: int


class RemotePacks:
    """The chunks of some packs in the bucket.

    Args:
        bucket: the fleet's.
        tenant: whose.
        hasher: of the tenant.
        packs: where the chunks may be.
    """

    def __init__(self, bucket: Bucket, tenant: str, hasher: Hasher, packs: Sequence[PackSize]) -> None:
        self._bucket, self._tenant, self._hasher = bucket, tenant, hasher
        self._packs = packs
        self._loaded: Entries | None = None

    def content(self, entry: TreeEntry) -> bytes:
        """The proved content of a regular file."""
        parts: dict[int, bytes] = {}
        offset = 0
        wanted: dict[bytes, list[int]] = {}
        for chunk, length in self.refs(entry):
            parts[offset] = bytes(length) if chunk == ZERO_ID else b""
            if chunk != ZERO_ID:
                wanted.setdefault(chunk, []).append(offset)
            offset += length

        def place(at: int, data: bytes) -> None:
            parts[at] = data

        self._fetch(wanted, place, lambda count: None)
        return b"".join(parts[at] for at in sorted(parts))

    def fill(self, files: Iterable[tuple[Path, TreeEntry]], progress: Progress | None = None) -> None:
        """Writes the proved content of regular files into files that exist at their size; holes stay holes.

        Raises:
            StorageError: a pack is not in the bucket, or the disk is full.
            CheckpointError: something is damaged.
        """
        wanted: dict[bytes, list[Place]] = {}
        total = 0
        for path, entry in files:
            offset = 0
            for chunk, length in self.refs(entry):
                if chunk != ZERO_ID:
                    wanted.setdefault(chunk, []).append(Place(path, offset))
                    total += length
                offset += length
        self._fetch(wanted, _write, Meter(total, progress).add)

    def refs(self, entry: TreeEntry) -> list[tuple[bytes, int]]:
        """The proved (chunk id, length) pairs of a regular file."""
        raw = base64.b64decode(entry.chunks)
        found = self._hasher.file(entry.size, raw)
        refs = list(CHUNK_REF.iter_unpack(raw)) if len(raw) % CHUNK_REF.size == 0 else []
        if found != entry.digest or sum(length for _, length in refs) != entry.size:
            raise damaged(f"the list of chunks of {entry.path}", (entry.digest or "")[:16], found[:16])
        return refs

    def _fetch(
        self, wanted: Mapping[bytes, list[P]], place: Callable[[P, bytes], None], count: Callable[[int], None]
    ) -> None:
        index = self._index() if wanted else {}
        located: list[tuple[Location, bytes]] = []
        for chunk in wanted:
            if chunk not in index:
                raise missing(f"Chunk {chunk.hex()[:12]} of tenant {self._tenant}", self._bucket.url)
            located.append((Location._make(index[chunk]), chunk))
        runs: list[list[tuple[Location, bytes]]] = []
        for at, chunk in sorted(located):
            if runs and _joins(runs[-1], at):
                runs[-1].append((at, chunk))
            else:
                runs.append([(at, chunk)])

        def one(run: list[tuple[Location, bytes]]) -> None:
            start, end = run[0][0].offset, run[-1][0].offset + run[-1][0].stored
            data = self._range(run[0][0].pack, start, end - start)
            for at, chunk in run:
                piece = self._prove(data[at.offset - start : at.offset - start + at.stored], at, chunk)
                for target in wanted[chunk]:
                    place(target, piece)
                    count(len(piece))

        each(runs, one, parallel=8)

    def _prove(self, data: bytes, at: Location, chunk: bytes) -> bytes:
        if at.stored != at.length:
            try:
                data = zstandard.ZstdDecompressor().decompress(data, max_output_size=at.length)
            except zstandard.ZstdError:
                data = b""
        found = self._hasher.chunk(data)
        if found != chunk:
            what = f"the chunk at offset {at.offset} of {documents.pack_key(self._tenant, at.pack)}"
            raise damaged(what, f"of hash {chunk.hex()[:16]}", found.hex()[:16])
        return data

    def _index(self) -> Entries:
        if self._loaded is None:
            merged: Entries = {}
            for entries in each(self._packs, self._load, parallel=8):
                merged.update(entries)
            self._loaded = merged
        return self._loaded

    def _load(self, item: PackSize) -> Entries:
        pack, size = item
        name = f"the pack {documents.pack_key(self._tenant, pack)}"
        tail = self._range(pack, max(0, size - _TAIL_GUESS), min(size, _TAIL_GUESS))
        length = tail_bytes(tail[-TRAILER_BYTES:], size, name)
        if length > len(tail):
            tail = self._range(pack, size - length, length)
        return parse_tail(pack, tail[-length:], self._hasher, name)

    def _range(self, pack: str, start: int, length: int) -> bytes:
        key = documents.pack_key(self._tenant, pack)
        try:
            data = self._bucket.get_range(key, start, length)
        except FileNotFoundError:
            raise missing(key, self._bucket.url) from None
        if len(data) != length:
            raise damaged(key, f"at least {start + length} bytes long", "shorter")
        return data


def _joins(run: Sequence[tuple[Location, bytes]], at: Location) -> bool:
    first, last = run[0][0], run[-1][0]
    end = last.offset + last.stored
    return (
        at.pack == first.pack and at.offset - end <= _GAP_BYTES and at.offset + at.stored - first.offset <= _RUN_BYTES
    )


def _write(place: Place, data: bytes) -> None:
    try:
        fd = os.open(place.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            view, offset = memoryview(data), place.offset
            while view:
                count = os.pwrite(fd, view, offset)
                view, offset = view[count:], offset + count
        finally:
            os.close(fd)
    except OSError as error:
        raise from_os_error(error, f"write {place.path.name}", str(place.path.parent)) from error
