"""A local fleet for the demo, seen as a user sees it: through the `ergo` command, and queries of a Temporal client."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from rich.console import Console
from temporalio.client import Client

from cli.fleet.overview import live_step
from infra.settings import Settings
from model.control import JobView
from model.names import Query
from proxy_runtime.storage.fleet import FleetStore

ROOT = Path(__file__).resolve().parents[2]
ERGO = [sys.executable, "-m", "cli.main"]
NODES, DEVICES = 2, 2


class FleetError(Exception):
    """The scene cannot go on; the message says why."""


class Fleet:
    """A fleet of two nodes with two CPU accelerators each."""

    def __init__(self, directory: Path, console: Console, client: Client, settings: Settings) -> None:
        self._directory = directory
        self._console = console
        self._client = client
        self._settings = settings
        self._store: FleetStore = settings.fleet_store()

    @classmethod
    @asynccontextmanager
    async def up(cls, directory: Path, console: Console) -> AsyncIterator[Self]:
        """A fleet with its state in `directory`; taken down, with everything of it, however the block ends."""
        try:
            await _ergo(console, directory, ["up", "--nodes", str(NODES), "--devices", str(DEVICES)])
            os.environ["ERGO_FLEET_DIR"] = str(directory)
            settings = Settings.load()
            yield cls(directory, console, await settings.connect_temporal(), settings)
        finally:
            await asyncio.shield(_ergo(console, directory, ["down", "--purge"], quiet=True))

    async def ergo(self, *arguments: str) -> str:
        """Runs an `ergo` command, shown as it would be typed; returns its standard output."""
        return await _ergo(self._console, self._directory, arguments)

    async def submit(self, directory: Path, *arguments: str) -> str:
        """Submits what is in `directory`; returns the job's id."""
        return (await _ergo(self._console, self._directory, ["submit", *arguments], cwd=directory)).strip()

    async def untouched(self, directory: Path, ranks: int, script: Sequence[str]) -> None:
        """Runs an example alone, without the fleet and with no operation on it."""
        directory.mkdir()
        name, *arguments = script
        command = ["run", "--nproc", str(ranks), "--devices", str(ranks), str(ROOT / "examples" / name), *arguments]
        await _ergo(self._console, self._directory, command, cwd=directory)

    async def tell_events(self) -> None:
        """Prints job events and decisions as they come out of Kafka, until cancelled."""
        process = await asyncio.create_subprocess_exec(
            *ERGO, "events", "-f", env=_env(self._directory), stdin=asyncio.subprocess.DEVNULL
        )
        try:
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()  # it only reads
                await process.wait()

    async def show(self, job: str) -> JobView:
        """The job as its workflow sees it."""
        return await self._client.get_workflow_handle(job).query(Query.SHOW, result_type=JobView)

    async def step(self, view: JobView) -> int:
        """The step that its nodes have told with their last lease; 0 where none has it."""
        nodes = await asyncio.to_thread(self._store.nodes)
        return int(live_step(view.id, view.epoch, nodes) or 0)

    async def node_names(self) -> list[str]:
        """Names of the nodes."""
        return sorted(record.node.name for record in await asyncio.to_thread(self._store.nodes))

    def ui_address(self, job: str | None = None) -> str:
        """Where the Temporal UI shows the workflow, or all of them."""
        file = self._settings.fleet_file()
        return "" if file is None else file.workflow_url(job)


def _env(directory: Path) -> dict[str, str]:
    return {**os.environ, "ERGO_FLEET_DIR": str(directory), "PYTHONPATH": str(ROOT)}


async def _ergo(
    console: Console, fleet: Path, arguments: Sequence[str], *, cwd: Path | None = None, quiet: bool = False
) -> str:
    if not quiet:
        console.print(f"[bold]$ ergo {' '.join(arguments)}[/]", markup=True)
    process = await asyncio.create_subprocess_exec(
        *ERGO,
        *arguments,
        env=_env(fleet),
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL if quiet else None,
    )
    try:
        out, _ = await process.communicate()
    except asyncio.CancelledError:
        if process.returncode is None:
            process.terminate()
            await process.wait()
        raise
    if process.returncode != 0 and not quiet:
        raise FleetError(f"`ergo {arguments[0]}` ended with code {process.returncode}")
    return out.decode()
