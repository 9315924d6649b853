"""One process at a time owns a fleet's directory: `ergo up` while it starts, then the supervisor, or `ergo down`."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self

_NAME = "lock"


class FleetLock:
    """A held lock. It goes with its descriptor: whoever inherits that holds it too."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def take(cls, fleet_dir: Path) -> Self | None:
        """Takes the lock of a directory that exists; None where another process has it."""
        path = fleet_dir / _NAME
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return None
            if _is(path, descriptor):
                return cls(descriptor)
            os.close(descriptor)  # `down --purge` has removed the file in between: its lock is nobody's

    def release(self) -> None:
        """Gives up this process's hold."""
        os.close(self.descriptor)


def held(fleet_dir: Path) -> bool:
    """Whether any process has it."""
    if not (fleet_dir / _NAME).exists():
        return False
    lock = FleetLock.take(fleet_dir)
    if lock is None:
        return True
    lock.release()
    return False


def _is(path: Path, descriptor: int) -> bool:
    try:
        there, mine = path.stat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
