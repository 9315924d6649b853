"""Real Temporal servers, offline, for the tests of a job's workflow."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from infra.converter import DATA_CONVERTER
from tests.infra.fixtures import temporal_at
from tests.workflows.job.fleet import Fleet


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Temporal's development server, for these tests alone: they have queues that others have, too."""
    with temporal_at(tmp_path_factory.mktemp("temporal")) as address:
        yield address


@pytest_asyncio.fixture(scope="session")
async def skipping() -> AsyncIterator[WorkflowEnvironment]:
    """Temporal's test server, whose time passes at once where nobody works."""
    env = await WorkflowEnvironment.start_time_skipping(
        test_server_existing_path=str(Path(sys.prefix) / "bin" / "temporal-test-server"), data_converter=DATA_CONVERTER
    )
    async with env:
        yield env


@pytest_asyncio.fixture(scope="session")
async def client(server: str) -> Client:
    return await Client.connect(server, data_converter=DATA_CONVERTER)


@pytest_asyncio.fixture
async def fleet(client: Client, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(client, tmp_path).up() as fleet:
        yield fleet
