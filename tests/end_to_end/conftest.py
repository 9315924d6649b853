"""Every test has an ERGO_HOME of its own for runs, and shares builds and CRIU with all others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proxy_runtime import build
from proxy_runtime.home import ergo_home
from tests.end_to_end import harness


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    build.ensure()
    shared = ergo_home()
    own = tmp_path_factory.mktemp("home")
    for name in ("builds", "cache", "criu", "selftest"):
        (shared / name).mkdir(parents=True, exist_ok=True)
        (own / name).symlink_to(shared / name)
    monkeypatch.setenv("ERGO_HOME", str(own))
    yield own
    limit = time.monotonic() + 15.0
    while left := leftovers(own):
        assert time.monotonic() < limit, f"processes were left behind: {left}"
        time.sleep(0.02)


def leftovers(home: Path) -> list[str]:
    """Processes that belong to runs of this home."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(home) in command:
                found.append(f"{entry.name}: {command}")
    return found


_untouched: dict[str, harness.Outcome] = {}


@pytest.fixture
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[harness.Script], harness.Outcome]:
    """The run of a script that nobody touched; made once a session."""

    def of(script: harness.Script) -> harness.Outcome:
        if str(script) not in _untouched:
            _untouched[str(script)] = harness.run(script, tmp_path_factory.mktemp("untouched"))
        return _untouched[str(script)]

    return of
