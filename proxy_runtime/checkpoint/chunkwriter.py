"""From files to chunks in packs: reading, cutting, hashing and writing on all cores.

Compression is off by default, because what counts is the time until a checkpoint is durable. Measured on 320 MB of
private pages of a process with torch, two busy cores: durable after 1.1 s without, after 2.8 to 3.4 s with zstd level
1, which shrinks 3.3 times at about 440 MB/s on two idle cores; the disk takes 0.8 to 1.6 GB/s with fsync. Restoring
takes 1.7 times as long with it. It pays where the disk is slower than about 300 MB/s, or space is dear.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import zstandard

from proxy_runtime.checkpoint import sparse
from proxy_runtime.checkpoint.chunkindex import ChunkIndex
from proxy_runtime.checkpoint.chunking import SEGMENT, split
from proxy_runtime.checkpoint.errors import CheckpointError
from proxy_runtime.checkpoint.files import Files
from proxy_runtime.checkpoint.merkle import ZERO_ID, Hasher, pack_refs
from proxy_runtime.checkpoint.pack import TARGET_BYTES, PackWriter

Compression = Literal["none", "zstd"]
_MAX_HOLE = 1 << 30
_WORTH = 0.9  # a compressed chunk must be this much shorter, else reading it costs more than it saves


class ChunkWriter:
    """Stores content and returns chunk lists. Thread-safe.

    Args:
        folder: where packs go.
        scratch: where they are while they are written; on the same file system, exists.
        index: chunks that are there already.
        threads: workers that read, cut and hash.
    """

    def __init__(
        self,
        folder: Path,
        scratch: Path,
        index: ChunkIndex,
        hasher: Hasher,
        files: Files,
        *,
        compression: Compression = "none",
        threads: int | None = None,
    ) -> None:
        self._folder = folder
        self._scratch = scratch
        self._index = index
        self._hasher = hasher
        self._files = files
        self._compression = compression
        self._local = threading.local()
        self._lock = threading.Lock()
        self._pack: PackWriter | None = None
        self._unsealed: list[PackWriter] = []
        self._claimed: dict[bytes, object] = {}
        self._used: set[str] = set()
        self._seals: list[Future[list[str]]] = []
        self.pool = ThreadPoolExecutor(threads or max(2, os.cpu_count() or 1), "ergo-chunks")
        # fsync of one pack overlaps with cutting the next.
        self._sealer = ThreadPoolExecutor(1, "ergo-seal")
        self.stored_bytes = 0

    def put_file(self, fd: int, size: int) -> bytes:
        """Stores the first ``size`` bytes of a file, in parallel; not to be called on a thread of the pool.

        Returns:
            The packed chunk list.
        """
        pieces: list[tuple[int, int] | Future[list[tuple[bytes, int]]]] = []
        position = 0
        for start, end in sparse.data_extents(fd, size):
            pieces.append((position, start))
            position = start
            while position < end:
                stop = min(end, (position // SEGMENT + 1) * SEGMENT)
                pieces.append(self.pool.submit(self._segment, fd, position, stop))
                position = stop
        pieces.append((position, size))
        refs: list[tuple[bytes, int]] = []
        error: BaseException | None = None
        for piece in pieces:
            if isinstance(piece, tuple):
                _extend(refs, [(ZERO_ID, piece[1] - piece[0])])
                continue
            try:
                _extend(refs, piece.result())
            except BaseException as e:  # the others use the descriptor: wait for all of them
                error = error or e
        if error is not None:
            raise error
        return _pack(refs)

    def put_small_file(self, fd: int, size: int) -> bytes:
        """Stores a file of at most one segment on the calling thread. Returns the packed chunk list."""
        return _pack(_extend([], self._segment(fd, 0, size))) if size else b""

    def put_bytes(self, data: bytes | memoryview) -> bytes:
        """Stores bytes. Returns the packed chunk list."""
        view = memoryview(data)
        refs: list[tuple[bytes, int]] = []
        for start in range(0, len(view), SEGMENT):
            _extend(refs, self._chunks(view[start : start + SEGMENT]))
        return _pack(refs)

    def put_blob(self, data: bytes) -> list[bytes]:
        """Stores bytes whole (trees). Returns the ids of their chunks."""
        view = memoryview(data)
        return [self.put_chunk(view[start : start + SEGMENT]) for start in range(0, len(view), SEGMENT)]

    def put_chunk(self, data: bytes | memoryview) -> bytes:
        """Stores bytes as one chunk. Returns its id."""
        chunk = self._hasher.chunk(data)
        self._store([(chunk, memoryview(data))])
        return chunk

    def finish(self) -> list[str]:
        """Makes everything durable.

        Returns:
            Ids of the packs that hold what was put, old ones included.
        """
        with self._lock:
            pack, self._pack = self._pack, None
        if pack is not None:
            self._seals.append(self._sealer.submit(self._seal, pack))
        for seal in self._seals:
            self._used.update(seal.result())
        self._files.sync_dir(self._folder)
        self.close()
        return sorted(self._used)

    def close(self) -> None:
        """Ends the threads and removes packs that are not sealed."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        self._sealer.shutdown(wait=True, cancel_futures=True)
        for pack in self._unsealed:
            pack.close()
            self._files.unlink(pack.scratch)
        self._unsealed.clear()

    def _segment(self, fd: int, start: int, end: int) -> list[tuple[bytes, int]]:
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = memoryview(bytearray(SEGMENT))  # reused: a fresh one costs page faults
        view = buffer[: end - start]
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done:]], start + done)
            if count == 0:
                raise CheckpointError("A file became shorter while the checkpoint was written.")
            done += count
        return self._chunks(view)

    def _chunks(self, view: memoryview) -> list[tuple[bytes, int]]:
        refs: list[tuple[bytes, int]] = []
        fresh: list[tuple[bytes, memoryview]] = []
        for span in split(view):
            if span.zero:
                refs.append((ZERO_ID, span.end - span.start))
                continue
            data = view[span.start : span.end]
            chunk = self._hasher.chunk(data)
            refs.append((chunk, len(data)))
            fresh.append((chunk, data))
        self._store(fresh)
        return refs

    def _store(self, chunks: Sequence[tuple[bytes, memoryview]]) -> None:
        fresh = [(chunk, self._compress(data), len(data)) for chunk, data in chunks if self._claim(chunk)]
        if not fresh:
            return
        full = None
        with self._lock:
            if self._pack is None:
                self._pack = PackWriter(self._scratch / secrets.token_hex(8), self._hasher, self._files)
                self._unsealed.append(self._pack)
            pack = self._pack
            offset = pack.reserve(fresh)
            self.stored_bytes += sum(len(data) for _, data, _ in fresh)
            if pack.size >= TARGET_BYTES:
                full, self._pack = pack, None
        pack.write(fresh, offset)
        if full is not None:
            self._seals.append(self._sealer.submit(self._seal, full))

    def _claim(self, chunk: bytes) -> bool:
        if (at := self._index.reusable(chunk)) is not None:
            self._used.add(at.pack)
            return False
        mine = object()
        return self._claimed.setdefault(chunk, mine) is mine

    def _compress(self, data: memoryview) -> memoryview | bytes:
        if self._compression == "none":
            return data
        compressor: zstandard.ZstdCompressor | None = getattr(self._local, "zstd", None)
        if compressor is None:
            compressor = self._local.zstd = zstandard.ZstdCompressor(
                level=1, write_content_size=False
            )  # the index knows it
        short = compressor.compress(data)
        return short if len(short) < len(data) * _WORTH else data

    def _seal(self, pack: PackWriter) -> list[str]:
        name, entries = pack.seal(self._folder)
        self._unsealed.remove(pack)
        self._index.add(name, entries)
        return [name]


def _extend(refs: list[tuple[bytes, int]], more: Sequence[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
    """Appends chunks; runs of zeros join, so that equal content gives equal lists whether or not it has holes."""
    for chunk, length in more:
        if chunk == ZERO_ID and refs and refs[-1][0] == ZERO_ID:
            refs[-1] = (ZERO_ID, refs[-1][1] + length)
        elif length:
            refs.append((chunk, length))
    return refs


def _pack(refs: Sequence[tuple[bytes, int]]) -> bytes:
    flat: list[tuple[bytes, int]] = []
    for chunk, length in refs:
        while chunk == ZERO_ID and length > _MAX_HOLE:
            flat.append((ZERO_ID, _MAX_HOLE))
            length -= _MAX_HOLE
        flat.append((chunk, length))
    return pack_refs(flat)
