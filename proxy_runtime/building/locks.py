"""One builder at a time for a build."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def build_lock(builds: Path, build_id: str, progress: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock of `build_id`, waiting for another builder to end. The kernel frees it when its holder dies."""
    builds.mkdir(parents=True, exist_ok=True)
    # The file stays: removing it would let two builders lock two files of one name.
    descriptor = os.open(builds / f".lock-{build_id}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is making this build; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
