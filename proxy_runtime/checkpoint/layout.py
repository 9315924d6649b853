"""Where things lie in a store, and the shared means to get at them.

STORE/format                                        what this is, and its version
STORE/keyring                                       a key for each tenant, mode 0600
STORE/tenants/TENANT/lock                           shared: writers, readers; exclusive: garbage collection
STORE/tenants/TENANT/packs/ID.pack
STORE/tenants/TENANT/writing/                       packs without a name yet
STORE/tenants/TENANT/jobs/JOB/HEAD                  the committed checkpoint, with its epoch
STORE/tenants/TENANT/jobs/JOB/lock                  held for the conditional write of HEAD
STORE/tenants/TENANT/jobs/JOB/manifests/CHECKPOINT
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from model.errors import ModelError
from model.ids import CheckpointId, JobId, TenantId
from model.manifest import HEAD_FORMAT, MANIFEST_FORMAT, MANIFEST_VERSION, Head, Manifest
from proxy_runtime.checkpoint import documents
from proxy_runtime.checkpoint.chunkindex import ChunkIndex
from proxy_runtime.checkpoint.errors import WRONG_KEY, CheckpointError, damaged
from proxy_runtime.checkpoint.files import Files
from proxy_runtime.checkpoint.merkle import Hasher

_Id = TypeVar("_Id", JobId, CheckpointId)


@dataclass(frozen=True, slots=True)
class Layout:
    """One tenant's share of a store."""

    root: Path
    tenant: TenantId
    hasher: Hasher
    files: Files
    index: ChunkIndex

    @property
    def base(self) -> Path:
        """The tenant's directory."""
        return self.root / "tenants" / self.tenant

    @property
    def lock(self) -> Path:
        """Lock of the tenant's packs and manifests."""
        return self.base / "lock"

    @property
    def packs(self) -> Path:
        """Directory of packs."""
        return self.base / "packs"

    @property
    def writing(self) -> Path:
        """Directory of packs that are being written."""
        return self.base / "writing"

    def job(self, job: JobId) -> Path:
        """A job's directory."""
        return self.base / "jobs" / job

    def manifest(self, job: JobId, checkpoint: CheckpointId) -> Path:
        """File of a manifest."""
        return self.job(job) / "manifests" / checkpoint

    def jobs(self) -> list[JobId]:
        """Jobs that have a checkpoint here, sorted."""
        folder = self.base / "jobs"
        names = [_valid(JobId, p.name) for p in folder.iterdir()] if folder.is_dir() else []
        return sorted(j for j in names if j is not None and ((self.job(j) / "HEAD").exists() or self.manifests(j)))

    def manifests(self, job: JobId) -> list[CheckpointId]:
        """Checkpoints of a job that have a manifest, committed or not, sorted."""
        folder = self.job(job) / "manifests"
        if not folder.is_dir():
            return []
        names = [_valid(CheckpointId, p.name) for p in folder.iterdir()]
        return sorted(c for c in names if c is not None)

    def leftovers(self) -> list[Path]:
        """Files that a crash left half-written, when nobody is writing."""
        jobs = self.base / "jobs"
        return [*self.writing.iterdir(), *jobs.glob("*/.*.*"), *jobs.glob("*/manifests/.*.*")]

    def read_head(self, job: JobId) -> Head | None:
        """A job's HEAD; None before its first commit.

        Raises:
            CheckpointError: it is damaged or of a newer format.
        """
        path = self.job(job) / "HEAD"
        if not path.exists():
            return None
        document = documents.read(path, "the HEAD", HEAD_FORMAT, MANIFEST_VERSION)
        try:
            head = Head.model_validate(document)
        except ValidationError as error:
            raise damaged(f"the HEAD {path}", "valid", _first(error)) from None
        if head.job != job:
            raise damaged(f"the HEAD {path}", f"of job {job}", f"of job {head.job}")
        return head

    def read_manifest(self, job: JobId, checkpoint: CheckpointId) -> Manifest:
        """A manifest, proved up to its root.

        Raises:
            CheckpointError: it is missing, damaged, of a newer format, or keyed with another key.
        """
        path = self.manifest(job, checkpoint)
        where = f"checkpoint {checkpoint[:15]} of job {job}"
        document = documents.read(path, "the manifest", MANIFEST_FORMAT, MANIFEST_VERSION, where=where)
        try:
            manifest = Manifest.model_validate(document)
        except ValidationError as error:
            raise damaged(f"the manifest {path}", "valid", _first(error)) from None
        if manifest.key_id != self.hasher.key_id:
            raise CheckpointError(
                f"The checkpoint {path} was written with the key {manifest.key_id}; the keyring of this store has "
                f"{self.hasher.key_id} for tenant {self.tenant}.",
                code=WRONG_KEY,
                remedy="Put back the keyring that belongs to it.",
            )
        root = self.hasher.root(manifest)
        if root != manifest.root or root != checkpoint or manifest.job != job:
            raise damaged(f"the manifest {path}", f"of root {checkpoint}", root)
        return manifest


def _valid(kind: type[_Id], name: str) -> _Id | None:
    try:
        return kind(name)
    except ModelError:
        return None  # a stranger's file


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{first['msg']} at {'.'.join(str(p) for p in first['loc']) or 'the top'}"
