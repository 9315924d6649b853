"""Real Temporal servers, offline, for the tests of a job's workflow."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from infra import temporal
from infra.converter import DATA_CONVERTER
from tests.workflows.job.fleet import Fleet


@pytest_asyncio.fixture(scope="session")
async def server() -> AsyncIterator[WorkflowEnvironment]:
    """Temporal's development server."""
    env = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(temporal.binary()),
        data_converter=DATA_CONVERTER,
        dev_server_log_level="error",
        dev_server_extra_args=[
            word
            for name, kind in temporal.SEARCH_ATTRIBUTES.items()
            for word in ("--search-attribute", f"{name}={kind}")
        ],
    )
    async with env:
        yield env


@pytest_asyncio.fixture(scope="session")
async def skipping() -> AsyncIterator[WorkflowEnvironment]:
    """Temporal's test server, whose time passes at once where nobody works."""
    env = await WorkflowEnvironment.start_time_skipping(
        test_server_existing_path=str(Path(sys.prefix) / "bin" / "temporal-test-server"), data_converter=DATA_CONVERTER
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
