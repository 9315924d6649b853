"""How a part ended, for those who wait for it and for those who find its shim gone."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

from model.codec import to_json
from model.runtime import AttendResult


class PartOutcome:
    """Set once. Thread-safe.

    Args:
        path: where it is kept for whoever finds the shim gone.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = threading.Condition()
        self._result: AttendResult | None = None

    @property
    def result(self) -> AttendResult | None:
        """How it ended, once it has."""
        return self._result

    def wait(self, timeout_s: float) -> AttendResult | None:
        """The result as soon as there is one; None after `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._result is not None, timeout_s)
            return self._result

    def settle(self, result: AttendResult, *, keep: bool) -> bool:
        """Sets it; False where it was set. Not to `keep` is for a part whose run directory is another's by now."""
        with self._changed:
            if self._result is not None:
                return False
            if keep:
                with suppress(OSError):  # a full disk: it is told over the socket
                    fresh = self._path.with_suffix(".new")
                    fresh.write_bytes(to_json(result))
                    fresh.rename(self._path)
            self._result = result
            self._changed.notify_all()
            return True
