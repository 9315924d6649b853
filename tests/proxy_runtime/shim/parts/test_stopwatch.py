"""Time adds up over pauses, whatever is repeated."""

from __future__ import annotations

import pytest

from proxy_runtime.shim.parts import stopwatch
from proxy_runtime.shim.parts.stopwatch import Stopwatch


def test_only_time_between_start_and_stop_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: now[0])
    watch = Stopwatch()
    watch.stop()
    assert watch.ms == 0
    watch.start()
    now[0] += 2
    watch.start()
    now[0] += 1
    assert watch.ms == 3000
    watch.stop()
    now[0] += 100
    watch.stop()
    assert watch.ms == 3000
    watch.start()
    now[0] += 0.5
    assert watch.ms == 3500
