"""Time that adds up over pauses."""

from __future__ import annotations

import threading
import time


class Stopwatch:
    """Wall time between starts and stops. Thread-safe; starting or stopping twice does nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum_s = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Goes on."""
        with self._lock:
            if self._since is None:
                self._since = time.monotonic()

    def stop(self) -> None:
        """Pauses."""
        with self._lock:
            if self._since is not None:
                self._sum_s += time.monotonic() - self._since
                self._since = None

    @property
    def ms(self) -> float:
        """Milliseconds so far."""
        with self._lock:
            return (self._sum_s + (0.0 if self._since is None else time.monotonic() - self._since)) * 1e3
