"""Work on many things at a time, with progress."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Done = TypeVar("Done")

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, from several threads but never at the same time."""


class Meter:
    """Adds up bytes of several threads for a progress callback."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Counts bytes."""
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self._total)


def each(items: Sequence[Item], work: Callable[[Item], Done], parallel: int) -> list[Done]:
    """Runs ``work`` on all items, some at a time; the first error ends the rest."""
    if not items:
        return []
    with ThreadPoolExecutor(max(1, min(parallel, len(items))), "ergo-transfer") as pool:
        jobs: list[Future[Done]] = [pool.submit(work, item) for item in items]
        done, pending = wait(jobs, return_when=FIRST_EXCEPTION)
        if pending:
            pool.shutdown(wait=True, cancel_futures=True)
        for job in done:
            job.result()
        return [job.result() for job in jobs]
