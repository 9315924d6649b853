"""The build whose operators are tested."""

from __future__ import annotations

import sys

import pytest

from proxy_runtime import build
from tests.proxy_runtime.rank.launcher import Launcher


@pytest.fixture(scope="session")
def launcher() -> Launcher:
    runtime = build.ensure(progress=lambda line: print(line, file=sys.stderr))
    return Launcher(runtime.rank_dir, runtime.device_dir)
