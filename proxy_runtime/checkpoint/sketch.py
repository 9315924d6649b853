"""What tells files that are mostly the same, without comparing them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from proxy_runtime.checkpoint import sparse
from proxy_runtime.checkpoint.chunking import SEGMENT, split
from proxy_runtime.checkpoint.merkle import HASH_BYTES, ZERO_ID, Hasher

SKETCH = 32
"""Ids of chunks in a sketch: enough to tell a quarter in common from a few constants."""

_HASHER = Hasher(bytes(HASH_BYTES))  # nobody else ever sees these ids


def sketch(chunks: Iterable[bytes], size: int = SKETCH) -> tuple[str, ...]:
    """The lowest ids of a file's chunks, shortened; zeros are none. Two files that have much in common have the
    more of them in common, whatever is beside that.
    """
    return tuple(one[:8].hex() for one in sorted(set(chunks) - {ZERO_ID})[:size])


def sketch_of(path: Path) -> tuple[str, ...]:
    """The sketch of a file that is in no store. To be compared with others of this process only.

    Raises:
        OSError: it cannot be read.
    """
    found: set[bytes] = set()
    buffer = memoryview(bytearray(SEGMENT))
    with open(path, "rb", buffering=0) as file:
        for start, end in sparse.data_extents(file.fileno(), os.fstat(file.fileno()).st_size):
            while start < end:
                stop = min(end, (start // SEGMENT + 1) * SEGMENT)
                file.seek(start)
                if not (count := file.readinto(buffer[: stop - start])):
                    return sketch(found)
                view = buffer[:count]
                found.update(_HASHER.chunk(view[span.start : span.end]) for span in split(view) if not span.zero)
                start += count
    return sketch(found)
