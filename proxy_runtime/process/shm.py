"""The container's /dev/shm, which CRIU expects to find on restore: taken along as a tar file.

Files have other inodes in the restored container. torch's multiprocessing takes a file of /dev/shm that comes from
another process for one that it has mapped already if device and inode are equal; so that no batch of a data loader is
taken for an earlier one, no container has a /dev/shm with a device number that one of the same processes had before.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from proxy_runtime.process.namespace import Container

ARCHIVE = "dev-shm.tar"
DEVICES = "dev-shm.json"


def save(container: Container, directory: Path) -> None:
    """Writes what is in /dev/shm, if anything, and the device numbers that it had by now. The tree must be frozen.

    Deleted files that are still in use are not there; CRIU keeps those itself.
    """
    source = _of(container)
    (directory / DEVICES).write_text(json.dumps([*container.shm_before, source.stat().st_dev]))
    if any(source.iterdir()):
        with tarfile.open(directory / ARCHIVE, "w", format=tarfile.PAX_FORMAT) as archive:
            archive.add(source, arcname=".")


def devices(directory: Path) -> tuple[int, ...]:
    """The device numbers that the /dev/shm of these processes had; none in the images of older builds.

    Raises:
        ValueError: damaged.
    """
    try:
        found = json.loads((directory / DEVICES).read_bytes())
    except FileNotFoundError:
        return ()
    if not isinstance(found, list) or not all(isinstance(one, int) for one in found):
        raise ValueError(f"{DEVICES} is no list of numbers")
    return tuple(found)


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
