"""The build that the tests of the rank side run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from proxy_runtime import build

sys.path.insert(0, str(Path(__file__).parent))

from launcher import Launcher


@pytest.fixture(scope="session")
def runtime() -> build.Build:
    return build.ensure(progress=lambda line: print(line, file=sys.stderr))


@pytest.fixture
def launcher(runtime: build.Build) -> Launcher:
    return Launcher(runtime.rank_dir, runtime.device_dir)
