"""Packs as they travel between stores that share a tenant's key, where ids of chunks and packs are the same."""

from __future__ import annotations

import base64
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import zstandard

from model.ids import CheckpointId, JobId
from model.manifest import PartRef, Tree
from proxy_runtime.checkpoint import locks
from proxy_runtime.checkpoint.chunkreader import ChunkReader
from proxy_runtime.checkpoint.errors import damaged, from_os_error
from proxy_runtime.checkpoint.layout import Layout
from proxy_runtime.checkpoint.merkle import CHUNK_REF, ZERO_ID, Hasher
from proxy_runtime.checkpoint.pack import SUSPECT_SUFFIX, read_index
from proxy_runtime.checkpoint.parts import parse_tree

SETTLED_S = 60.0
"""How long at least stays what was written: whoever has just written it may still be about to say so."""


class Exchange:
    """A tenant's packs in a store, to be copied out and taken in. Made by :attr:`Store.exchange`."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.hasher = layout.hasher

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps garbage collection away for the length of a block."""
        folder = self._layout.base / "incoming"
        self._layout.files.make_dir(folder)
        with locks.held(self._layout.lock, shared=True):
            yield

    def touch(self, packs: Iterable[str]) -> None:
        """Says that packs are used again: none of them goes for its age now."""
        for pack in packs:
            self._layout.files.touch(self.path(pack))

    def path(self, pack: str) -> Path:
        """File of a pack that is here."""
        return self._layout.index.path(pack)

    def has(self, pack: str) -> bool:
        """Whether a pack is here, and nobody found damage in it."""
        path = self.path(pack)
        return path.exists() and not path.with_suffix(SUSPECT_SUFFIX).exists()

    def incoming(self, pack: str) -> Path:
        """Where a pack is written while it comes; what is there may be continued."""
        return self._layout.base / "incoming" / f"{pack}.part"

    @contextmanager
    def receiving(self, pack: str, deadline_s: float) -> Iterator[None]:
        """One at a time, over all processes, receives a pack. To be used within :meth:`held`."""
        with locks.held(self.incoming(pack).with_suffix(".lock"), shared=False, deadline_s=deadline_s):
            yield

    def adopt(self, pack: str, source: Path) -> int:
        """Proves every chunk of a received pack and takes it into the store.

        Returns:
            How many chunks it has.

        Raises:
            CheckpointError: it is not the pack, or damaged; ``source`` is still there.
        """
        layout = self._layout
        try:
            chunks = prove(pack, source, layout.hasher)
            fd = os.open(source, os.O_RDWR | os.O_CLOEXEC)
            try:
                layout.files.sync(fd)
            finally:
                os.close(fd)
            target = self.path(pack)
            layout.files.rename(source, target)
            layout.files.unlink(target.with_suffix(SUSPECT_SUFFIX))
            layout.files.touch(target)
            layout.files.sync_dir(target.parent)
        except OSError as error:
            raise from_os_error(error, "take a pack in", path=error.filename or source) from error
        layout.index.refresh()
        return chunks

    def tree(self, ref: PartRef) -> Tree:
        """The proved entries of a part whose tree is here; errors as of :meth:`tree_bytes`."""
        return parse_tree(ref, self.tree_bytes(ref), self._layout.hasher)

    def tree_bytes(self, ref: PartRef) -> bytes:
        """The bytes of a part's tree.

        Raises:
            CheckpointError: it is not here, or damaged.
        """
        with self.held():
            self._layout.index.refresh()
            with ChunkReader(self._layout.index, self._layout.hasher) as chunks:
                data = b""
                for chunk in ref.chunks:
                    at = self._layout.index.get(bytes.fromhex(chunk))
                    data += chunks.read([(bytes.fromhex(chunk), at.length if at else 0)], "a list of files")
        return data

    def packs_of(self, ref: PartRef) -> list[str]:
        """The packs here that hold a part, its list of files included; sorted."""
        tree = self.tree(ref)
        found = {self._layout.index.get(bytes.fromhex(chunk)) for chunk in ref.chunks}
        for entry in tree.entries:
            for chunk, _ in CHUNK_REF.iter_unpack(base64.b64decode(entry.chunks)):
                if chunk != ZERO_ID:
                    found.add(self._layout.index.get(chunk))
        return sorted({at.pack for at in found if at is not None})

    def jobs(self) -> list[JobId]:
        """Jobs of which a checkpoint's manifest is here."""
        return self._layout.jobs()

    def retain(
        self,
        keep: Mapping[JobId, Collection[CheckpointId]],
        min_age_s: float,
        now_s: float,
        *,
        over: Collection[JobId] = (),
    ) -> tuple[int, int]:
        """Removes other checkpoints of some jobs, and then the packs that no checkpoint of any job names.

        Unlike :meth:`Store.gc` it moves no chunks, so that the packs are the same on all nodes, and it does not mind
        packs that were never here.

        Args:
            keep: the jobs, and their checkpoints that stay.
            min_age_s: packs and checkpoints that came or were used again within so many seconds stay: a node may still
                have to push what it has written, or restore what it has pulled.
            now_s: seconds since 1970.
            over: jobs that will never do that again: of what only they have named just the last minute stays.

        Returns:
            Packs removed, and their bytes.

        Raises:
            CheckpointError: somebody reads or writes all the time, or a checkpoint is damaged.
        """
        layout = self._layout
        young = now_s - min_age_s
        settled = now_s - min(min_age_s, SETTLED_S)
        with locks.held(layout.lock, shared=False):
            let_go: set[str] = set()
            for job, kept in keep.items():
                for checkpoint in layout.manifests(job):
                    path = layout.manifest(job, checkpoint)
                    if checkpoint in kept or path.stat().st_mtime >= (settled if job in over else young):
                        continue
                    if job in over:
                        let_go.update(layout.read_manifest(job, checkpoint).packs)
                    layout.files.unlink(path)
            live = {p for j in layout.jobs() for c in layout.manifests(j) for p in layout.read_manifest(j, c).packs}
            dropped = size = 0
            for path in layout.packs.glob("*.pack"):
                info = path.stat()
                if path.stem not in live and info.st_mtime < (settled if path.stem in let_go else young):
                    layout.files.unlink(path)
                    layout.files.unlink(path.with_suffix(SUSPECT_SUFFIX))
                    dropped, size = dropped + 1, size + info.st_size
            for path in (layout.base / "incoming").glob("*"):
                if path.stat().st_mtime < young:
                    layout.files.unlink(path)
            layout.index.refresh()
        return dropped, size


def prove(pack: str, path: Path, hasher: Hasher) -> int:
    """Reads a pack that may have any file name and proves every chunk. Returns their number.

    Raises:
        CheckpointError: it is not the pack of this id, or damaged.
    """
    entries = read_index(path, hasher, pack)
    inflate = zstandard.ZstdDecompressor()
    with open(path, "rb", buffering=1 << 20) as file:
        for chunk, (_, offset, stored, length) in sorted(entries.items(), key=lambda item: item[1][1]):
            file.seek(offset)
            data = file.read(stored)
            if stored != length:
                try:
                    data = inflate.decompress(data, max_output_size=length)
                except zstandard.ZstdError:
                    data = b""
            found = hasher.chunk(data)
            if found != chunk or len(data) != length:
                raise damaged(f"the chunk at offset {offset} of the pack {path}", chunk.hex()[:16], found.hex()[:16])
    return len(entries)
