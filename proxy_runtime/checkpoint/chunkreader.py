"""Reading a checkpoint back: nothing is handed out that was not proved against the root."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import zstandard

from proxy_runtime.checkpoint.chunkindex import ChunkIndex
from proxy_runtime.checkpoint.errors import CheckpointError, damaged, missing
from proxy_runtime.checkpoint.merkle import Hasher
from proxy_runtime.checkpoint.pack import Location

_RUN_BYTES = 4 << 20


class Wanted(NamedTuple):
    """A chunk to be read: its id, its length, where it goes in the output."""

    chunk: bytes
    length: int
    offset: int


@dataclass(slots=True)
class ChunkReader:
    """Reads and proves chunks. Thread-safe; a context manager that closes its descriptors.

    Attributes:
        hints: packs that held the checkpoint's chunks when it was written; tell what is missing.
    """

    index: ChunkIndex
    hasher: Hasher
    hints: Sequence[str] = ()
    _fds: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _local: threading.local = field(default_factory=threading.local)

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def locate(self, wanted: Wanted, where: str) -> Location:
        """Where a chunk lies.

        Raises:
            CheckpointError: no pack has it; says which pack is missing or damaged.
        """
        at = self.index.get(wanted.chunk)
        if at is None:
            for pack in self.hints:
                if (error := self.index.broken.get(pack)) is not None:
                    message = f"{error.message} It is needed for {where}."
                    raise CheckpointError(message, code=error.code, remedy=error.remedy)
            for pack in self.hints:
                if not self.index.path(pack).exists():
                    raise missing(f"the pack {self.index.path(pack)}", where=where)
            raise missing(f"chunk {wanted.chunk.hex()[:12]}", where=where)
        if at.length != wanted.length:
            name = f"the index of the pack {self.index.path(at.pack)}"
            raise damaged(name, f"of a chunk of {wanted.length} bytes", f"of one of {at.length}", where=where)
        return at

    def runs(self, wanted: Sequence[Wanted], where: str) -> Iterator[list[tuple[Wanted, Location]]]:
        """Groups chunks that lie and go back to back, so that one read and one write do for many."""
        run: list[tuple[Wanted, Location]] = []
        size = 0
        for want in wanted:
            at = self.locate(want, where)
            if run:
                last_want, last = run[-1]
                joined = at.pack == last.pack and at.offset == last.offset + last.stored
                joined = joined and want.offset == last_want.offset + last_want.length
                if not joined or size + at.stored > _RUN_BYTES:
                    yield run
                    run, size = [], 0
            run.append((want, at))
            size += at.stored
        if run:
            yield run

    def read_run(self, run: Sequence[tuple[Wanted, Location]], where: str) -> list[memoryview | bytes]:
        """Reads one run of :meth:`runs` and proves every chunk. The views hold until the thread's next call.

        Raises:
            CheckpointError: a chunk is not what its id says, or the pack is missing or too short.
        """
        first, last = run[0][1], run[-1][1]
        path = self.index.path(first.pack)
        size = last.offset + last.stored - first.offset
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._local.buffer = memoryview(bytearray(max(size, _RUN_BYTES)))
        view = buffer[:size]
        done = 0
        try:
            fd = self._open(first.pack, where)
            while done < size and (count := os.preadv(fd, [view[done:]], first.offset + done)):
                done += count
        except OSError as error:
            raise CheckpointError(f"Could not read the pack {path}: {error.strerror}.") from error
        if done < size:
            raise damaged(f"the pack {path}", f"at least {first.offset + size} bytes long", "shorter", where=where)
        result: list[memoryview | bytes] = []
        for want, at in run:
            start = at.offset - first.offset
            data: memoryview | bytes = view[start : start + at.stored]
            if at.stored != at.length:
                data = self._inflate(data, at)
            found = self.hasher.chunk(data)
            if found != want.chunk:
                self.index.suspect(at.pack)
                what = f"the chunk at offset {at.offset} of the pack {path}"
                raise damaged(what, f"of hash {want.chunk.hex()[:16]}", found.hex()[:16], where=where)
            result.append(data)
        return result

    def read(self, chunks: Sequence[tuple[bytes, int]], where: str) -> bytes:
        """Reads and joins chunks given as (id, length)."""
        wanted: list[Wanted] = []
        offset = 0
        for chunk, length in chunks:
            wanted.append(Wanted(chunk, length, offset))
            offset += length
        out = bytearray(offset)
        for run in self.runs(wanted, where):
            for (want, _), data in zip(run, self.read_run(run, where), strict=True):
                out[want.offset : want.offset + want.length] = data
        return bytes(out)

    def _open(self, pack: str, where: str) -> int:
        with self._lock:
            if (fd := self._fds.get(pack)) is None:
                path = self.index.path(pack)
                try:
                    fd = self._fds[pack] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    raise missing(f"the pack {path}", where=where) from None
            return fd

    def _inflate(self, data: memoryview | bytes, at: Location) -> bytes:
        decompressor: zstandard.ZstdDecompressor | None = getattr(self._local, "zstd", None)
        if decompressor is None:
            decompressor = self._local.zstd = zstandard.ZstdDecompressor()
        try:
            return decompressor.decompress(data, max_output_size=at.length)
        except zstandard.ZstdError:
            return b""  # hashes to something else


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Threads for one restore or verification; on an error the rest of the work is dropped."""
    pool = ThreadPoolExecutor(max(2, os.cpu_count() or 1), "ergo-read")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def free_path(path: Path) -> Path:
    """The nearest existing directory at or above ``path``."""
    while not path.exists():
        path = path.parent
    return path
