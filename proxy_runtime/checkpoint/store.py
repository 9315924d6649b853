"""The checkpoint store: a directory."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from model.errors import ModelError
from model.ids import CheckpointId, Epoch, JobId, TenantId
from model.manifest import Manifest, ManifestHeader, PartRef
from proxy_runtime.checkpoint import documents, gc, keyring, locks
from proxy_runtime.checkpoint.chunkindex import ChunkIndex
from proxy_runtime.checkpoint.chunkwriter import Compression
from proxy_runtime.checkpoint.errors import (
    NOT_A_CHECKPOINT,
    UNSUPPORTED,
    WRONG_KEY,
    CheckpointError,
    damaged,
    from_os_error,
    missing,
    no_space,
)
from proxy_runtime.checkpoint.exchange import Exchange
from proxy_runtime.checkpoint.export import export
from proxy_runtime.checkpoint.files import Files, free_bytes
from proxy_runtime.checkpoint.layout import Layout
from proxy_runtime.checkpoint.merkle import Hasher
from proxy_runtime.checkpoint.parts import Part
from proxy_runtime.checkpoint.reader import CheckpointReader
from proxy_runtime.checkpoint.writer import CheckpointWriter, WrittenParts, check_epoch, seal_manifest

FORMAT = "ergosphere/store"
VERSION = 1
LOCAL_TENANT = TenantId("local")


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """One line about a committed checkpoint; fields as in the manifest, ``step`` is the lowest of any rank."""

    id: CheckpointId
    job: JobId
    epoch: Epoch
    step: int
    world_size: int
    created_at_ns: int
    bytes: int
    stored_bytes: int
    head: bool


class Store:
    """A tenant's view of a directory of checkpoints. Thread-safe, and safe between processes.

    Attributes:
        path: the directory.
        tenant: whose checkpoints and key are used.
    """

    def __init__(self, layout: Layout, compression: Compression) -> None:
        self.path = layout.root
        self.tenant = layout.tenant
        self._layout = layout
        self._compression: Compression = compression

    @classmethod
    def open(
        cls,
        path: Path,
        tenant: str = LOCAL_TENANT,
        *,
        create: bool = True,
        compression: Compression = "none",
        files: Files | None = None,
        key: bytes | None = None,
    ) -> Self:
        """Opens a store.

        Args:
            path: its directory.
            tenant: whose share of it; a tenant that is new gets a key of its own.
            create: make what is missing: the store in a missing or empty directory, the tenant in its keyring.
            compression: of chunks written from now on; see :mod:`~proxy_runtime.checkpoint.chunkwriter`.
            files: how the file system is changed.
            key: the tenant's, 32 bytes, where it comes from outside: nodes of a fleet use one, so that ids of chunks
                are equal on all of them. A store that has another one is refused.

        Raises:
            CheckpointError: ``path`` is something else, its keyring is missing or damaged, or its format newer.
        """
        files = files or Files()
        name = _tenant(tenant)
        try:
            keys = _open_root(path, create, files)
            if name not in keys:
                if not create:
                    raise CheckpointError(f"The keyring of {path} has no key for tenant {name}.", code=WRONG_KEY)
                if (path / "tenants" / name).exists():
                    raise CheckpointError(
                        f"The keyring of {path} has no key for tenant {name}, who has checkpoints there.",
                        code=WRONG_KEY,
                        remedy="Put back the keyring that belongs to the store.",
                    )
                with locks.held(path / "lock", shared=False):
                    keys = keyring.load(path / keyring.NAME)
                    if name not in keys:
                        keys = keyring.add(path / keyring.NAME, keys, name, files, key=key)
            if key is not None and keys[name] != key:
                raise CheckpointError(
                    f"{path} was made with another key for tenant {name}.",
                    code=WRONG_KEY,
                    remedy="Use the secret of the fleet that it belongs to, or another directory.",
                )
            hasher = Hasher(keys[name])
            layout = Layout(path, name, hasher, files, ChunkIndex(path / "tenants" / name / "packs", hasher))
            if create:
                for folder in (layout.packs, layout.writing, layout.base / "jobs"):
                    files.make_dir(folder)
        except OSError as error:
            raise from_os_error(error, "open the checkpoint store", path=error.filename or path) from error
        return cls(layout, compression)

    @property
    def exchange(self) -> Exchange:
        """Its packs, to be copied to and from other stores that have the tenant's key."""
        return Exchange(self._layout)

    def begin(self, job_id: str, epoch: int, *, expected_bytes: int = 0) -> CheckpointWriter:
        """Starts a checkpoint.

        Args:
            job_id: the job.
            epoch: the epoch that takes it.
            expected_bytes: what it may have to write at most; checked against the free space.

        Raises:
            FencedError: a higher epoch has committed already.
            CheckpointError: too little space, HEAD is damaged, or the name of the job is none.
        """
        job = _job(job_id)
        lock = locks.acquire(self._layout.lock, shared=True)
        try:
            for folder in (self._layout.packs, self._layout.writing, self._layout.job(job) / "manifests"):
                self._layout.files.make_dir(folder)
            if (free := free_bytes(self._layout.packs)) < expected_bytes:
                raise no_space(self.path, expected_bytes, free)
            check_epoch(self._layout, job, Epoch(epoch))
            self._layout.index.refresh()
            return CheckpointWriter(self._layout, job, Epoch(epoch), self._compression, lock)
        except OSError as error:
            locks.release(lock)
            raise from_os_error(error, "begin a checkpoint", path=error.filename or self.path) from error
        except BaseException:
            locks.release(lock)
            raise

    def assemble(
        self, job_id: str, epoch: int, header: ManifestHeader, parts: Sequence[WrittenParts]
    ) -> CheckpointReader:
        """Makes the manifest of a checkpoint from what several nodes have written, and stores it.

        HEAD stays as it is: a job of several nodes has its head elsewhere. The chunks need not be here.

        Args:
            job_id: the job.
            epoch: the epoch that takes the checkpoint.
            header: of the whole job; its parent is taken as it is.
            parts: each part once. A rank without any gets empty ones.

        Raises:
            CheckpointError: a part is there twice or of a rank that does not exist, or the disk is full.
        """
        refs: dict[Part, PartRef] = {}
        for written in parts:
            for part, ref in written.refs.items():
                if part in refs or (part.rank is not None and part.rank >= header.world_size):
                    what = "is there twice" if part in refs else f"is not of a job of {header.world_size} ranks"
                    raise CheckpointError(f"A checkpoint of {job_id} cannot be made: {part} {what}.", code=UNSUPPORTED)
                refs[part] = ref
        packs = tuple(sorted({pack for written in parts for pack in written.packs}))
        exits = {rank: code for written in parts for rank, code in written.exits.items()}
        whole = WrittenParts(refs, packs, sum(written.stored_bytes for written in parts), exits)
        manifest = seal_manifest(self._layout, _job(job_id), Epoch(epoch), header, whole)
        return self.adopt(manifest)

    def adopt(self, manifest: Manifest) -> CheckpointReader:
        """Stores a manifest that was made elsewhere with this tenant's key; HEAD stays as it is.

        Raises:
            CheckpointError: it is not what its root says, or the disk is full.
        """
        layout = self._layout
        if manifest.key_id != layout.hasher.key_id or layout.hasher.root(manifest) != manifest.root:
            raise damaged(f"the manifest of job {manifest.job}", f"of root {manifest.root}", "something else")
        path = layout.manifest(manifest.job, manifest.root)
        try:
            with locks.held(layout.lock, shared=True):
                layout.files.make_dir(path.parent)
                documents.write(path, manifest.model_dump(mode="json"), layout.files)
        except OSError as error:
            raise from_os_error(error, "store a manifest", path=error.filename or path) from error
        return CheckpointReader(layout, manifest)

    def read(self, ref: str | Path = "HEAD", job: str | None = None) -> CheckpointReader:
        """Finds a checkpoint and proves its manifest.

        Args:
            ref: a checkpoint id, ``HEAD``, or the directory of another store, whose HEAD is meant.
            job: whose; needed where the store has several jobs and ``ref`` does not tell.

        Raises:
            CheckpointError: there is none, or it is damaged, of a newer format or keyed with another key.
        """
        if isinstance(ref, Path) or os.sep in ref or (ref != "HEAD" and os.path.isdir(ref)):
            return open_checkpoint(Path(ref), job=job)
        jobs = self._layout.jobs() if job is None else [_job(job)]
        if ref != "HEAD":
            try:
                checkpoint = CheckpointId(ref)
            except ModelError as error:
                raise CheckpointError(error.message, code=NOT_A_CHECKPOINT, remedy=error.remedy) from None
            owner = next((j for j in jobs if self._layout.manifest(j, checkpoint).exists()), None)
            if owner is None:
                raise missing(f"checkpoint {checkpoint[:15]} of {' or '.join(jobs) or 'any job'} in {self.path}")
            return CheckpointReader(self._layout, self._layout.read_manifest(owner, checkpoint))
        if len(jobs) != 1:
            found = f"checkpoints of {len(jobs)} jobs ({', '.join(jobs)})" if jobs else "no checkpoint"
            remedy = "Name the job." if jobs else ""
            raise CheckpointError(f"{self.path} holds {found}.", code=NOT_A_CHECKPOINT, remedy=remedy)
        head = self._layout.read_head(jobs[0])
        if head is None:
            path = self._layout.job(jobs[0]) / "HEAD"
            raise missing(f"the HEAD {path}", where=f"finding the last committed checkpoint of job {jobs[0]}")
        return CheckpointReader(self._layout, self._layout.read_manifest(jobs[0], head.checkpoint))

    def list(self, job: str | None = None) -> list[CheckpointSummary]:
        """The committed checkpoints of one job or of all, newest first.

        Where HEAD or a manifest on the way is damaged, so that nobody knows what was committed, it is all of the
        job's checkpoints whose manifests are good.
        """
        result: list[CheckpointSummary] = []
        for name in self._layout.jobs() if job is None else [_job(job)]:
            for manifest, head in self._history(name):
                refs = [r for rank in manifest.ranks for r in (rank.process, rank.device)] + [manifest.volume]
                result.append(
                    CheckpointSummary(
                        id=manifest.root,
                        job=name,
                        epoch=manifest.epoch,
                        step=min(manifest.header.steps),
                        world_size=manifest.header.world_size,
                        created_at_ns=manifest.header.created_at_ns,
                        bytes=sum(ref.bytes for ref in refs if ref is not None),
                        stored_bytes=manifest.stored_bytes,
                        head=head,
                    )
                )
        return result

    def _history(self, job: JobId) -> Iterator[tuple[Manifest, bool]]:
        layout = self._layout
        try:
            chain = [layout.read_manifest(job, c) for c in gc.committed(layout, job)]
            yield from ((manifest, at == 0) for at, manifest in enumerate(chain))
            return
        except CheckpointError:
            good: list[Manifest] = []
        for checkpoint in layout.manifests(job):
            try:
                good.append(layout.read_manifest(job, checkpoint))
            except CheckpointError:
                continue
        yield from ((m, False) for m in sorted(good, key=lambda m: m.header.created_at_ns, reverse=True))

    def gc(self, keep: Collection[str] = (), *, last: int = 1, deadline_s: float = 60.0) -> gc.Collected:
        """Removes what no kept checkpoint needs. Waits until nobody writes or reads.

        Args:
            keep: ids of checkpoints to keep, committed or not.
            last: of each job its HEAD and as many ancestors as make this number are kept.
            deadline_s: how long to wait.

        Raises:
            CheckpointError: a kept checkpoint is damaged (nothing is removed then), or the store is in use.
        """
        try:
            return gc.collect(self._layout, {CheckpointId(c) for c in keep}, last, deadline_s)
        except OSError as error:
            raise from_os_error(error, "collect garbage", path=error.filename or self.path) from error

    def export(self, checkpoint: CheckpointReader, dest: Path) -> CheckpointReader:
        """Copies a checkpoint to a directory of its own, with a key of its own, so that it can be carried away.

        Args:
            checkpoint: what to copy.
            dest: a missing or empty directory. It becomes a store with one job and one checkpoint.

        Returns:
            The copy. Its id is another, since ids are keyed.

        Raises:
            CheckpointError: the checkpoint is damaged, ``dest`` is not empty, or there is no space.
        """
        if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
            raise CheckpointError(f"{dest} is not an empty directory.", remedy="Choose another one.")
        target = Store.open(dest, self.tenant, compression=self._compression, files=self._layout.files)
        needed = sum(ref.bytes for ref in checkpoint.refs().values())
        with target.begin(checkpoint.manifest.job, checkpoint.manifest.epoch, expected_bytes=needed) as writer:
            export(checkpoint, writer)
            exits = {rank.rank: rank.exit_code for rank in checkpoint.manifest.ranks if rank.exit_code is not None}
            writer.commit(checkpoint.manifest.header.model_copy(update={"parent": None}), exits or None)
        return target.read()


def open_checkpoint(path: Path, job: str | None = None, tenant: str = LOCAL_TENANT) -> CheckpointReader:
    """The HEAD of the store at ``path``, which is not changed.

    Raises:
        CheckpointError: it is no store, or its checkpoint is damaged.
    """
    return Store.open(path, tenant, create=False).read("HEAD", job)


def _open_root(path: Path, create: bool, files: Files) -> dict[str, bytes]:
    marker, ring = path / "format", path / keyring.NAME
    if not marker.exists() and create:
        if path.exists() and (not path.is_dir() or any(p.name not in ("lock", keyring.NAME) for p in _visible(path))):
            raise _no_store(path)
        files.make_dir(path)
        with locks.held(path / "lock", shared=False):
            if not marker.exists():
                # The keyring first: a store that has its marker has its keyring, or has lost it.
                if not ring.exists():
                    keyring.add(ring, {}, LOCAL_TENANT, files)
                documents.write(marker, {"format": FORMAT, "version": VERSION}, files)
    if not marker.exists():
        raise _no_store(path)
    documents.read(marker, "the format file", FORMAT, VERSION)
    return keyring.load(ring)


def _visible(path: Path) -> list[Path]:
    return [p for p in path.iterdir() if not p.name.startswith(".")]


def _no_store(path: Path) -> CheckpointError:
    kind = "a directory without a checkpoint's format file" if path.is_dir() else "no directory"
    return CheckpointError(
        f"{path} is not a checkpoint directory: it is {kind}.",
        code=NOT_A_CHECKPOINT,
        remedy="Name the directory that was given as --checkpoint-dir.",
    )


def _job(name: str) -> JobId:
    try:
        return JobId(name)
    except ModelError as error:
        raise CheckpointError(error.message, code=UNSUPPORTED, remedy=error.remedy) from None


def _tenant(name: str) -> TenantId:
    try:
        return TenantId(name)
    except ModelError as error:
        raise CheckpointError(error.message, code=UNSUPPORTED, remedy=error.remedy) from None
