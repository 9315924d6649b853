"""Packs: files of about 64 MiB that hold chunks back to back, and at their end the index.

    header   8 bytes magic, u32 version, zeros up to 64
    chunks   as stored: raw, or a zstd frame where that is shorter
    index    48 bytes a chunk: id (32), offset u64, stored u32, length u32; stored == length: raw
    trailer  u64 index offset, u32 chunks, 32 bytes node over the index, 8 bytes magic

Index and chunks become durable by one fsync, and a pack becomes visible by one rename, to the name that its
index hashes to. So a pack under a final name is complete, or damaged afterwards.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from proxy_runtime.checkpoint.errors import CheckpointError, damaged, missing, newer_format
from proxy_runtime.checkpoint.files import Files
from proxy_runtime.checkpoint.merkle import Hasher

VERSION = 1
TARGET_BYTES = 64 << 20
_MAGIC = b"ERGOPACK"
_HEADER = struct.Struct("<8sI52x")
_ENTRY = struct.Struct("<32sQII")
_TRAILER = struct.Struct("<QI32s8s")
SUFFIX = ".pack"
SUSPECT_SUFFIX = ".suspect"
"""An empty file beside a pack in which a damaged chunk was found: new checkpoints must not build on it."""


class Location(NamedTuple):
    """Where a chunk lies: its pack (hexadecimal id), offset there, stored and original length in bytes."""

    pack: str
    offset: int
    stored: int
    length: int


Entries = dict[bytes, tuple[str, int, int, int]]
"""Chunks of a pack by id: the fields of a `Location`, plain because there are very many of them."""


class PackWriter:
    """A pack being written. Thread-safe: space is reserved under a lock, written outside of it."""

    def __init__(self, scratch: Path, hasher: Hasher, files: Files) -> None:
        self.scratch = scratch
        self._hasher = hasher
        self._files = files
        self._lock = threading.Condition()
        self._entries: list[tuple[bytes, int, int, int]] = []
        self._end = _HEADER.size
        self._writing = 0
        self._fd = files.create(scratch)
        files.write_at(self._fd, [_HEADER.pack(_MAGIC, VERSION)], 0)

    @property
    def size(self) -> int:
        """Bytes of chunks so far, the header included."""
        return self._end

    def reserve(self, chunks: Sequence[tuple[bytes, memoryview | bytes, int]]) -> int:
        """Takes space for chunks given as (id, stored bytes, original length); :meth:`write` must follow.

        Returns:
            The offset to give to :meth:`write`.
        """
        with self._lock:
            start = offset = self._end
            for chunk, data, length in chunks:
                self._entries.append((chunk, offset, len(data), length))
                offset += len(data)
            self._end = offset
            self._writing += 1
        return start

    def write(self, chunks: Sequence[tuple[bytes, memoryview | bytes, int]], offset: int) -> None:
        """Writes chunks into the space reserved for them."""
        try:
            self._files.write_at(self._fd, [data for _, data, _ in chunks], offset)
        finally:
            with self._lock:
                self._writing -= 1
                self._lock.notify_all()

    def seal(self, folder: Path) -> tuple[str, Entries]:
        """Writes the index, makes the pack durable and gives it its final name in ``folder``.

        Returns:
            The pack's id and the location of each chunk. The name itself is durable after the folder is synced.
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._writing)
        try:
            index = b"".join(_ENTRY.pack(*entry) for entry in self._entries)
            node = self._hasher.node("pack", index)
            trailer = _TRAILER.pack(self._end, len(self._entries), node, _MAGIC)
            self._files.write_at(self._fd, [index, trailer], self._end)
            self._files.sync(self._fd)
        finally:
            self.close()
        pack = node.hex()[:40]
        self._files.rename(self.scratch, folder / (pack + SUFFIX))
        return pack, {c: (pack, offset, stored, length) for c, offset, stored, length in self._entries}

    def close(self) -> None:
        """Closes the descriptor; what was not sealed stays as garbage under its scratch name."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


TRAILER_BYTES = _TRAILER.size


def tail_bytes(trailer: bytes, size: int, name: str) -> int:
    """Length of a pack's index and trailer, from its last `TRAILER_BYTES` bytes and its length.

    Raises:
        CheckpointError: the trailer is damaged.
    """
    if size >= _HEADER.size + _TRAILER.size and len(trailer) == _TRAILER.size:
        start, count, _, magic = _TRAILER.unpack(trailer)
        if start + count * _ENTRY.size + _TRAILER.size == size and magic == _MAGIC:
            return size - start
    raise damaged(f"the end of {name}", f"a trailer that fits {size} bytes", "something else")


def parse_tail(pack: str, tail: bytes, hasher: Hasher, name: str) -> Entries:
    """Proves and reads a pack's index, given with the trailer.

    Raises:
        CheckpointError: it is not that of the pack.
    """
    index, trailer = tail[: -_TRAILER.size], tail[-_TRAILER.size :]
    found = hasher.node("pack", index)
    if found != _TRAILER.unpack(trailer)[2] or found.hex()[:40] != pack:
        raise damaged(f"the index of {name}", f"of hash {pack}", found.hex()[:40])
    return {c: (pack, offset, stored, length) for c, offset, stored, length in _ENTRY.iter_unpack(index)}


def read_index(path: Path, hasher: Hasher, pack: str = "") -> Entries:
    """Reads and proves a pack's index; ``pack`` is its id, where the file is not called by it.

    Raises:
        CheckpointError: the pack is missing, damaged (header, index, trailer or length) or of a newer format.
    """
    pack = pack or path.stem
    name = f"the pack {path}"
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _HEADER.size + _TRAILER.size:
                raise damaged(name, "a pack", f"a file of {size} bytes")
            header = file.read(_HEADER.size)
            file.seek(size - _TRAILER.size)
            length = tail_bytes(file.read(_TRAILER.size), size, name)
            file.seek(size - length)
            tail = file.read(length)
    except FileNotFoundError:
        raise missing(name) from None
    except OSError as error:
        raise CheckpointError(f"Could not read {name}: {error.strerror}.") from error
    entries = parse_tail(pack, tail, hasher, name)
    magic, version = _HEADER.unpack(header)
    if magic == _MAGIC and version > VERSION:
        raise newer_format(f"The pack {path}", version, VERSION)
    if header != _HEADER.pack(_MAGIC, VERSION):
        raise damaged(f"the header of {name}", "that of a pack", header[:12].hex())
    return entries
