"""Calls that are repeated while the first is still running are joined to it: a retried activity does nothing twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Joined:
    """Runs a call once at a time for each key; whoever asks meanwhile gets the same result or error.

    Results are remembered until `forget`, errors are not: a failed call may be made again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[Hashable, Future[Any]] = {}

    def run(self, key: Hashable, call: Callable[[], T], *, remember: bool = True) -> T:
        """Returns what `call` returns, or what the call under this key has returned."""
        with self._lock:
            future = self._calls.get(key)
            mine = future is None
            if future is None:
                future = self._calls[key] = Future()
        if not mine:
            return future.result()
        try:
            result = call()
        except BaseException as error:
            self._drop(key, future)
            future.set_exception(error)
            raise
        if not remember:
            self._drop(key, future)
        future.set_result(result)
        return result

    def forget(self, matching: Callable[[Any], bool]) -> None:
        """Forgets the results of calls that are done and whose keys match."""
        with self._lock:
            for key in [key for key, future in self._calls.items() if future.done() and matching(key)]:
                del self._calls[key]

    def _drop(self, key: Hashable, future: Future[Any]) -> None:
        with self._lock:
            if self._calls.get(key) is future:
                del self._calls[key]
