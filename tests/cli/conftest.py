"""A real Temporal server, a store in a directory, and the `ergo` command as a user starts it."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from infra.converter import DATA_CONVERTER
from model.names import JOB_TASK_QUEUE
from tests.cli.job_double import JobDouble
from tests.infra.fixtures import temporal_at

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


class Ergo:
    """The command line, against the services of a test."""

    def __init__(self, env: dict[str, str], directory: Path) -> None:
        self.env = env
        self.directory = directory

    async def __call__(self, *arguments: str, code: int = 0, cwd: Path | None = None, **env: str) -> Done:
        """Runs a command and checks its exit code."""
        process = await self.start(*arguments, cwd=cwd, **env)
        out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S * 3)
        done = Done(process.returncode or 0, out.decode(), err.decode())
        assert done.code == code, f"ergo {' '.join(arguments)}: {done.code}\n{done.out}\n{done.err}"
        assert "Traceback" not in done.err
        return done

    async def start(self, *arguments: str, cwd: Path | None = None, **env: str) -> asyncio.subprocess.Process:
        """Starts a command; whoever calls it ends it."""
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cli.main", *arguments, cwd=cwd or self.directory, env={**self.env, **env},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip


@pytest.fixture(scope="session")
def temporal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Temporal server for these tests alone: doubles of jobs have the queue that real ones have elsewhere."""
    with temporal_at(tmp_path_factory.mktemp("temporal")) as address:
        yield address


@pytest.fixture(scope="session")
async def client(temporal: str) -> Client:
    return await Client.connect(temporal, data_converter=DATA_CONVERTER)


@pytest.fixture
def plain_env(tmp_path: Path) -> dict[str, str]:
    """An environment in which there is no fleet, whatever there is on this machine."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("ERGO_", "TEMPORAL_"))}
    return {
        **keep,
        "PYTHONPATH": str(ROOT),
        "ERGO_FLEET_DIR": str(tmp_path / "fleet"),
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "TERM": "dumb",
    }


@pytest.fixture
def ergo(client: Client, plain_env: dict[str, str], tmp_path: Path) -> Ergo:
    """The command line with the test's Temporal and a store of its own."""
    (tmp_path / "store").mkdir()
    (tmp_path / "secret").write_bytes(secrets.token_bytes(32))
    directory = tmp_path / "work"
    directory.mkdir()
    env = {
        **plain_env,
        "TEMPORAL_ADDRESS": client.service_client.config.target_host,
        "ERGO_STORE_URL": (tmp_path / "store").as_uri(),
        "ERGO_SECRET_FILE": str(tmp_path / "secret"),
    }
    return Ergo(env, directory)


@pytest.fixture
async def worker(client: Client) -> AsyncIterator[Worker]:
    """Serves doubles of jobs while a test runs."""
    async with Worker(client, task_queue=JOB_TASK_QUEUE, workflows=[JobDouble]) as serving:
        yield serving


@pytest.fixture
async def job(client: Client, worker: Worker) -> AsyncIterator[Callable[..., object]]:
    """Starts doubles of jobs; none is left running."""
    started: list[WorkflowHandle[JobDouble, str]] = []

    async def start(name: str, **fields: object) -> WorkflowHandle[JobDouble, str]:
        from model.job_spec import parse_job_spec

        spec = parse_job_spec({"apiVersion": "ergosphere/v1", "argv": ["true"], "name": name, **fields})
        handle = await client.start_workflow(
            JobDouble.run, spec, id=f"{name}-{secrets.token_hex(3)}", task_queue=JOB_TASK_QUEUE
        )
        started.append(handle)
        return handle

    yield start
    for handle in started:
        try:
            await handle.terminate(rpc_timeout=timedelta(seconds=5))
        except Exception:
            pass  # it has ended already


@pytest.fixture
def store(ergo: Ergo, tmp_path: Path) -> FleetStore:  # noqa: F821
    """The store that the command line looks into."""
    from proxy_runtime.storage.blobs import Bucket
    from proxy_runtime.storage.fleet import FleetStore

    return FleetStore(Bucket.open(ergo.env["ERGO_STORE_URL"]), (tmp_path / "secret").read_bytes())
