"""The directory under a job's overlay: what the job was submitted with, as this node has it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from model.ids import CheckpointId, TenantId
from model.job_spec import EmptyVolume, JobSpec, PathVolume, UploadedVolume
from proxy_runtime.node.errors import unsuitable
from proxy_runtime.node.joining import Joined
from proxy_runtime.shim.layout import PRIVATE_ROOT

Materialize = Callable[[TenantId, CheckpointId, Path], None]
"""Brings an uploaded directory: whole or not at all, and once."""


def inside(spec: JobSpec, job: str) -> str:
    """Where the ranks see their directory: a path that every node can have, whatever else is on it."""
    return spec.volume.path if isinstance(spec.volume, PathVolume) else f"{PRIVATE_ROOT}/{job}.d"


class BaseVolumes:
    """Base directories of a node; each is made once and never written to.

    Args:
        directory: the node's.
        materialize: brings an uploaded one.
    """

    def __init__(self, directory: Path, materialize: Materialize) -> None:
        self._node = directory
        self._directory = directory / "volumes"
        self._materialize = materialize
        self._joined = Joined()

    def of(self, spec: JobSpec) -> Path:
        """The base directory of a job.

        Raises:
            NodeError: ``runtime.unsuitable``: the path of the volume is not a directory here, or holds the node's own.
            ErgoError: the uploaded directory cannot be had from the store.
        """
        match spec.volume:
            case PathVolume(path=path):
                return self._of_path(Path(path))
            case EmptyVolume():
                empty = self._directory / "_empty"
                empty.mkdir(parents=True, exist_ok=True)
                return empty
            case UploadedVolume(manifest=manifest):
                folder = self._directory / spec.tenant / manifest
                return self._joined.run(folder, lambda: self._bring(spec.tenant, manifest, folder), remember=False)

    def keep_only(self, specs: Iterable[JobSpec]) -> None:
        """Removes uploaded directories that none of these jobs has."""
        used = {(s.tenant, s.volume.manifest) for s in specs if isinstance(s.volume, UploadedVolume)}
        for folder in self._directory.glob("*/*"):
            if (folder.parent.name, folder.name) not in used:
                shutil.rmtree(folder, ignore_errors=True)

    def _of_path(self, path: Path) -> Path:
        if not path.is_dir():
            raise unsuitable(
                f"The job directory {path} is not a directory of this node.",
                "Mount it there, or submit the directory with the job.",
            )
        if self._node.is_relative_to(path):
            raise unsuitable(
                f"The job directory {path} contains the node's own state ({self._node}).",
                "Use a directory that does not, or another directory for the node.",
            )
        return path

    def _bring(self, tenant: TenantId, manifest: CheckpointId, folder: Path) -> Path:
        self._materialize(tenant, manifest, folder)
        return folder
