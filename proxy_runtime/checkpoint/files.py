"""The store's only way to change the file system: one seam, so that a test can fail at any write.

A file becomes visible in one way only: written under another name, fsynced, renamed, its directory fsynced.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

PRIVATE_DIR = 0o700
PRIVATE_FILE = 0o600


class Files:
    """Mutating file-system calls. Every one of them may be a process's last."""

    def make_dir(self, path: Path) -> None:
        """Creates a private directory and its parents, durably; one that exists is fine."""
        if path.is_dir():
            return
        self.make_dir(path.parent)
        path.mkdir(mode=PRIVATE_DIR, exist_ok=True)
        self.sync_dir(path.parent)

    def create(self, path: Path) -> int:
        """Creates a private file that must not exist; returns its descriptor."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)

    def write_at(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        """Writes all of ``buffers``, one after the other, at ``offset``."""
        pending = [memoryview(b) for b in buffers if len(b)]
        while pending:
            done = os.pwritev(fd, pending[:1000], offset)
            offset += done
            while pending and done >= len(pending[0]):
                done -= len(pending.pop(0))
            if done:
                pending[0] = pending[0][done:]

    def sync(self, fd: int) -> None:
        """Makes a file's content durable."""
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Renames within one file system, replacing ``target``."""
        os.replace(source, target)

    def sync_dir(self, path: Path) -> None:
        """Makes a directory's names durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def touch(self, path: Path) -> None:
        """Sets a file's time to now."""
        os.utime(path)

    def unlink(self, path: Path) -> None:
        """Removes a file; one that is gone is fine."""
        path.unlink(missing_ok=True)

    def remove_dir(self, path: Path) -> None:
        """Removes an empty directory."""
        path.rmdir()

    def publish(self, path: Path, data: bytes, scratch: Path) -> None:
        """Writes ``data`` to ``path`` so that it is there whole or not at all, and stays.

        Args:
            path: its final name.
            data: all of its content.
            scratch: a name that does not exist, on the same file system.
        """
        fd = self.create(scratch)
        try:
            self.write_at(fd, [data], 0)
            self.sync(fd)
        finally:
            os.close(fd)
        self.rename(scratch, path)
        self.sync_dir(path.parent)


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write to the file system of ``path``."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize
