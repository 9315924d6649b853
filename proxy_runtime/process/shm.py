"""The container's /dev/shm, which CRIU expects to find on restore: taken along as a tar file."""

from __future__ import annotations

import tarfile
from pathlib import Path

from proxy_runtime.process.namespace import Container

ARCHIVE = "dev-shm.tar"


def save(container: Container, directory: Path) -> None:
    """Writes what is in /dev/shm, if anything. The tree must be frozen.

    Deleted files that are still in use are not there; CRIU keeps those itself.
    """
    source = _of(container)
    if any(source.iterdir()):
        with tarfile.open(directory / ARCHIVE, "w", format=tarfile.PAX_FORMAT) as archive:
            archive.add(source, arcname=".")


def load(container: Container, directory: Path) -> None:
    """Puts it back into the fresh /dev/shm of a container.

    Raises:
        tarfile.TarError, OSError: damaged or no memory.
    """
    path = directory / ARCHIVE
    if path.exists():
        with tarfile.open(path) as archive:
            archive.extractall(_of(container), filter="tar")


def _of(container: Container) -> Path:
    return Path(f"/proc/{container.init_pid}/root/dev/shm")
