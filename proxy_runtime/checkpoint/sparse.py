"""Holes: finding them in a file, and copying a file with them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

_COPY_BYTES = 64 << 20


def data_extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges (start, end) of a file's first ``size`` bytes that are not holes, in order."""
    offset = 0
    while offset < size:
        try:
            start = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # a hole up to the end
            raise
        if start >= size:
            return
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        yield start, end
        offset = end


def copy(source: int, target: int, size: int) -> None:
    """Copies ``size`` bytes between descriptors, holes as holes; shares blocks where the file system can."""
    os.ftruncate(target, size)
    for start, end in data_extents(source, size):
        while start < end:
            done = _copy_range(source, target, start, min(end - start, _COPY_BYTES))
            if done == 0:
                raise OSError(errno.EIO, "the file became shorter while it was copied")
            start += done


def _copy_range(source: int, target: int, offset: int, count: int) -> int:
    try:
        return os.copy_file_range(source, target, count, offset, offset)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    return os.pwrite(target, os.pread(source, min(count, 1 << 20), offset), offset)
