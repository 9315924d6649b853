"""Threads of a shim."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")

# Every rank that is restored keeps one busy until it may run; threads are made as they are needed.
_workers = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="ergo-shim")


def in_background(call: Callable[..., T], *arguments: Any) -> Future[T]:
    """Starts the call in another thread."""
    return _workers.submit(call, *arguments)


def in_parallel(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Runs the calls side by side; raises the first error after all have ended."""
    futures = [in_background(call) for call in calls]
    wait(futures)
    return [future.result() for future in futures]
