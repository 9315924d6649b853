"""One fleet for the tests of this folder: two nodes with two devices, up once; each test has jobs of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proxy_runtime import build
from tests.end_to_end.harness import Script
from tests.end_to_end.harness import run as run_alone
from tests.fleet.harness import EXAMPLES, LocalFleet, digests


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    """A module's `FLEET_ENV` is added to the environment of `ergo up`, and so of its nodes."""
    build.ensure()
    fleet = LocalFleet(tmp_path_factory.mktemp("fleet"))
    fleet.env |= getattr(request.module, "FLEET_ENV", {})
    fleet.up("--nodes", "2", "--devices", "2")
    try:
        yield fleet
    finally:
        fleet.down()


@pytest.fixture(autouse=True)
def _nothing_runs_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails leaves its job, which would take the devices of all that follow."""
    yield
    if "fleet" in request.fixturenames:
        fleet: LocalFleet = request.getfixturevalue("fleet")
        for job in json.loads(fleet.run("ps", "--json").stdout or "[]"):
            fleet.run("cancel", job["id"], "--wait")


_alone: dict[tuple[str, ...], dict[str, str]] = {}


@pytest.fixture
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """Digests of an example run by itself, with no operation on it; made once a session."""

    def of(script: str, ranks: int, *arguments: str) -> dict[str, str]:
        key = (script, str(ranks), *arguments)
        if key not in _alone:
            directory: Path = tmp_path_factory.mktemp("alone")
            outcome = run_alone(Script(EXAMPLES / script, (*arguments, "--out", "results"), ranks), directory)
            assert outcome.result.code == 0, outcome.logs
            _alone[key] = digests(directory / "results", ranks)
        return _alone[key]

    return of
