"""Locks between processes (flock): they end with the process that holds them."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy_runtime.checkpoint.errors import BUSY, CheckpointError

_POLL_S = 0.02


def acquire(path: Path, *, shared: bool, deadline_s: float = 60.0) -> int:
    """Takes a lock.

    Args:
        path: the file to lock; made if missing.
        shared: whether others may hold it shared too.
        deadline_s: how long to wait for it.

    Returns:
        A descriptor; closing it gives the lock back. -1 where a shared lock is asked for on a read-only file
        system, where nobody can change anything.

    Raises:
        CheckpointError: others held it all the time.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if shared and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return -1
        raise CheckpointError(f"Could not lock {path}: {error.strerror}.") from error
    end = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() < end:
                time.sleep(_POLL_S)
                continue
            os.close(fd)
            raise CheckpointError(
                f"Others have used {path.parent} for {deadline_s:g} s without a pause.",
                code=BUSY,
                remedy="Try again when no checkpoint is being written or read.",
            ) from None
        except BaseException:
            os.close(fd)
            raise


def release(fd: int) -> None:
    """Gives a lock back."""
    if fd >= 0:
        os.close(fd)


@contextmanager
def held(path: Path, *, shared: bool, deadline_s: float = 60.0) -> Iterator[None]:
    """A lock for the length of a block."""
    fd = acquire(path, shared=shared, deadline_s=deadline_s)
    try:
        yield
    finally:
        release(fd)
