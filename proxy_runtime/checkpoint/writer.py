"""Writing one checkpoint: content first, then the manifest, then the job's HEAD."""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import orjson
from pydantic import ValidationError

from model.ids import CheckpointId, Epoch, JobId
from model.manifest import Head, Manifest, ManifestHeader, PartRef, RankParts, TreeEntry, why_over
from proxy_runtime.checkpoint import documents, locks, volume
from proxy_runtime.checkpoint.chunking import SEGMENT
from proxy_runtime.checkpoint.chunkwriter import ChunkWriter, Compression
from proxy_runtime.checkpoint.errors import UNSUPPORTED, CheckpointError, FencedError, from_os_error
from proxy_runtime.checkpoint.layout import Layout
from proxy_runtime.checkpoint.merkle import CHUNK_REF, pack_refs
from proxy_runtime.checkpoint.parts import Part, TreeBuilder, entry_of
from proxy_runtime.checkpoint.sketch import SKETCH, sketch


@dataclass(frozen=True, slots=True)
class WrittenParts:
    """Parts that are durable in a store, of a checkpoint that nobody has committed yet.

    Attributes:
        refs: where their trees lie.
        packs: ids of the packs that hold their chunks, old ones included, sorted.
        stored_bytes: bytes of chunks added to the store.
        exits: exit codes of ranks that have no process.
    """

    refs: dict[Part, PartRef]
    packs: tuple[str, ...]
    stored_bytes: int
    exits: Mapping[int, int] = field(default_factory=dict[int, int])

    @property
    def ranks(self) -> tuple[RankParts, ...]:
        """The parts of ranks, in rank order."""
        ranks = sorted({part.rank for part in self.refs if part.rank is not None} | set(self.exits))
        return tuple(
            RankParts(
                rank=r,
                process=self.refs.get(Part.process(r)),
                device=self.refs.get(Part.device(r)),
                exit_code=self.exits.get(r),
            )
            for r in ranks
        )

    @property
    def volume(self) -> PartRef | None:
        """The job directory, where it was added."""
        return self.refs.get(Part.volume())

    @property
    def total_bytes(self) -> int:
        """Bytes that the parts refer to."""
        return sum(ref.bytes for ref in self.refs.values())


class CheckpointWriter:
    """A checkpoint being written; made by :meth:`Store.begin`. Methods may be called from several threads.

    Nothing of it is visible before :meth:`commit` returns. After an error only :meth:`abort` is left. As a context
    manager it aborts unless it was committed.
    """

    def __init__(self, layout: Layout, job: JobId, epoch: Epoch, compression: Compression, lock: int) -> None:
        self._layout = layout
        self._job = job
        self._epoch = epoch
        self._lock_fd = lock
        self._lock = threading.Lock()
        self._trees: dict[Part, TreeBuilder] = {}
        self._failed = False
        self._closed = False
        self._chunks = ChunkWriter(
            layout.packs, layout.writing, layout.index, layout.hasher, layout.files, compression=compression
        )

    def add_file(self, part: Part, name: str, path: Path) -> None:
        """Stores a regular file under ``name`` (relative, may have directories) with its mode, owner and time.

        The file is read now and may change afterwards.

        Raises:
            CheckpointError: it cannot be read, or the disk is full.
        """
        with self._guard(path):
            raw = os.fsencode(path)
            node = volume.read_node(os.path.dirname(raw) or b".", os.path.basename(raw), os.stat(path))
            if node.kind != "file":
                raise CheckpointError(f"{path} is not a regular file.", code=UNSUPPORTED)
            self._add(part, self._store_file(replace(node, path=name.encode()), raw, small=False))

    def add_bytes(self, part: Part, name: str, data: bytes) -> None:
        """Stores ``data`` as a file called ``name``."""
        with self._guard(name):
            refs = self._chunks.put_bytes(data)
            digest = self._layout.hasher.file(len(data), refs)
            node = volume.Node(name.encode(), "file", 0o600, os.geteuid(), os.getegid(), 0, size=len(data))
            self._add(part, entry_of(node, digest=digest, refs=refs))

    def add_tree(self, part: Part, root: Path) -> None:
        """Stores a directory with everything in it (see :mod:`~proxy_runtime.checkpoint.volume`).

        Raises:
            CheckpointError: it holds a device node or cannot be read, or the disk is full.
        """
        with self._guard(root):
            self.add_nodes(part, volume.capture(root))

    def add_nodes(self, part: Part, tree: volume.VolumeTree) -> None:
        """Stores chosen objects of a directory, parents before children.

        Raises:
            CheckpointError: one cannot be read, or the disk is full.
        """
        with self._guard(tree.root):
            base = os.fsencode(tree.root)
            entries: list[TreeEntry | Future[TreeEntry]] = []
            try:
                for node in tree.nodes:
                    path = os.path.join(base, node.path)
                    if node.kind != "file":
                        entries.append(entry_of(node))
                    elif node.size <= SEGMENT:  # whole on one thread; bigger ones are spread over all
                        entries.append(self._chunks.pool.submit(self._store_file, node, path, small=True))
                    else:
                        entries.append(self._store_file(node, path, small=False))
            finally:
                done = [e.result() if isinstance(e, Future) else e for e in entries]
            for entry in done:
                self._add(part, entry)

    def put_chunk(self, data: bytes) -> bytes:
        """Stores one chunk as it is, for :meth:`add_entry`. Returns its id."""
        with self._guard("a chunk"):
            return self._chunks.put_chunk(data)

    def add_entry(self, part: Part, entry: TreeEntry, refs: Sequence[tuple[bytes, int]]) -> None:
        """Adds an entry of another checkpoint, whose chunks were given to :meth:`put_chunk`."""
        with self._guard(entry.path):
            packed = pack_refs(refs)
            digest = self._layout.hasher.file(entry.size, packed) if entry.kind == "file" else None
            update = {"digest": digest, "chunks": base64.b64encode(packed).decode()}
            self._add(part, entry.model_copy(update=update))

    def sketch(self, part: Part, name: str, size: int = SKETCH) -> tuple[str, ...]:
        """What tells that a file has much in common with another one. Empty for a file that was not added."""
        with self._lock:
            entry = self._trees[part].get(name) if part in self._trees else None
        if entry is None:
            return ()
        return sketch((chunk for chunk, _ in CHUNK_REF.iter_unpack(base64.b64decode(entry.chunks))), size)

    def commit(self, header: ManifestHeader, exits: Mapping[int, int] | None = None) -> CheckpointId:
        """Makes the checkpoint durable and the job's HEAD point to it.

        Args:
            header: what the caller knows about it.
            exits: exit codes of ranks that have no process. With it, a job has to be able to go on from this; None
                where only files are kept.

        Raises:
            FencedError: HEAD has a higher epoch; what was written is garbage for :meth:`Store.gc`.
            CheckpointError: the header does not fit the parts, a rank has no process and has not exited with 0, or the
                disk is full or failing.
        """
        if self._failed or self._closed:
            raise CheckpointError("This checkpoint failed or was ended before and cannot be committed.")
        with self._guard("HEAD and manifest"):
            refs = {part: self._put_tree(tree) for part, tree in self._trees.items()}
            packs = self._chunks.finish()
            with locks.held(self._layout.job(self._job) / "lock", shared=False):
                head = check_epoch(self._layout, self._job, self._epoch)
                if header.parent is None and head is not None:
                    header = header.model_copy(update={"parent": head.checkpoint})
                manifest = self._manifest(header, refs, packs, exits)
                self._publish(manifest, head)
        self._close()
        return manifest.root

    def finish_parts(self) -> WrittenParts:
        """Makes the parts durable without a manifest: one node's share of a checkpoint of several.

        They are not reachable from any manifest until :meth:`Store.assemble` makes one; until then their packs are
        kept by their age (see :meth:`Store.gc`), which starts anew here, for old packs that are used again too.

        Raises:
            CheckpointError: the parts contradict themselves, or the disk is full or failing.
        """
        if self._failed or self._closed:
            raise CheckpointError("This checkpoint failed or was ended before and cannot be finished.")
        with self._guard("parts"):
            refs = {part: self._put_tree(tree) for part, tree in self._trees.items()}
            packs = self._chunks.finish()
            for pack in packs:
                self._layout.files.touch(self._layout.index.path(pack))
            written = WrittenParts(refs, tuple(packs), self._chunks.stored_bytes)
        self._close()
        return written

    def abort(self) -> None:
        """Gives up; the store is as it was, but for garbage. Harmless after a commit."""
        if not self._closed:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def _close(self) -> None:
        self._closed = True
        try:
            self._chunks.close()
        finally:
            locks.release(self._lock_fd)
            self._lock_fd = -1

    @contextmanager
    def _guard(self, subject: str | Path) -> Iterator[None]:
        if self._closed:
            raise CheckpointError("This checkpoint was committed or aborted before.")
        try:
            yield
        except BaseException as error:
            self._failed = True
            if isinstance(error, OSError):
                # The file is what was asked for; what is full is the store.
                needed = _size(subject) or self._chunks.stored_bytes
                path = error.filename or self._layout.root
                raise from_os_error(error, f"write the checkpoint ({subject})", path=path, needed=needed) from error
            if isinstance(error, ValidationError | ValueError):
                raise CheckpointError(f"The checkpoint cannot be written: {error}", code=UNSUPPORTED) from error
            raise

    def _add(self, part: Part, entry: TreeEntry) -> None:
        with self._lock:
            self._trees.setdefault(part, TreeBuilder()).add(entry)

    def _store_file(self, node: volume.Node, path: bytes, *, small: bool) -> TreeEntry:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            put = self._chunks.put_small_file if small else self._chunks.put_file
            refs = put(fd, node.size)
        finally:
            os.close(fd)
        return entry_of(node, digest=self._layout.hasher.file(node.size, refs), refs=refs)

    def _put_tree(self, builder: TreeBuilder) -> PartRef:
        tree = builder.build()
        data = orjson.dumps(tree.model_dump(mode="json"))
        return PartRef(
            digest=self._layout.hasher.tree(data),
            chunks=tuple(chunk.hex() for chunk in self._chunks.put_blob(data)),
            tree_bytes=len(data),
            entries=len(tree.entries),
            bytes=sum(e.size for e in tree.entries if e.kind == "file"),
        )

    def _manifest(
        self, header: ManifestHeader, refs: dict[Part, PartRef], packs: list[str], exits: Mapping[int, int] | None
    ) -> Manifest:
        strangers = sorted(str(p) for p in refs if p.rank is not None and not 0 <= p.rank < header.world_size)
        if strangers:
            raise ValueError(f"{strangers[0]} does not exist in a job of {header.world_size} ranks.")
        written = WrittenParts(refs, tuple(packs), self._chunks.stored_bytes, exits or {})
        manifest = seal_manifest(self._layout, self._job, self._epoch, header, written)
        if exits is not None and (why := why_over(manifest.ranks, header.pack)):
            raise ValueError(f"{why}.")
        return manifest

    def _publish(self, manifest: Manifest, head: Head | None) -> None:
        layout = self._layout
        documents.write(layout.manifest(self._job, manifest.root), manifest.model_dump(mode="json"), layout.files)
        sequence = 1 if head is None else head.sequence + 1
        new = Head(job=self._job, epoch=self._epoch, checkpoint=manifest.root, sequence=sequence)
        documents.write(layout.job(self._job) / "HEAD", new.model_dump(mode="json"), layout.files)


def seal_manifest(layout: Layout, job: JobId, epoch: Epoch, header: ManifestHeader, parts: WrittenParts) -> Manifest:
    """The manifest of a checkpoint, named by its Merkle root. Ranks without parts get empty ones."""
    present = {rank.rank: rank for rank in parts.ranks}
    manifest = Manifest(
        tenant=layout.tenant,
        job=job,
        epoch=epoch,
        key_id=layout.hasher.key_id,
        header=header,
        ranks=tuple(present.get(r) or RankParts(rank=r) for r in range(header.world_size)),
        volume=parts.volume,
        root=CheckpointId("ck-" + "0" * 40),
        packs=parts.packs,
        stored_bytes=parts.stored_bytes,
    )
    return manifest.model_copy(update={"root": layout.hasher.root(manifest)})


def check_epoch(layout: Layout, job: JobId, epoch: Epoch) -> Head | None:
    """Reads HEAD and refuses an epoch below it; without a HEAD, below that of any manifest of the job.

    Raises:
        FencedError: a higher epoch has committed.
        CheckpointError: HEAD is damaged.
    """
    head = layout.read_head(job)
    epochs = [head.epoch] if head else [layout.read_manifest(job, c).epoch for c in layout.manifests(job)]
    if epochs and max(epochs) > epoch:
        raise FencedError(
            f"Epoch {epoch} of job {job} may not commit any more: epoch {max(epochs)} has taken over.",
            remedy="Stop this epoch's processes; the job runs on elsewhere.",
        )
    return head


def _size(subject: str | Path) -> int:
    """Bytes of a file or directory that was to be stored; 0 where it is none."""
    try:
        return volume.capture(subject).bytes if isinstance(subject, Path) else 0
    except CheckpointError:
        return 0
