"""Waits until every part of a fleet serves, and says which one does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import orjson

from events.errors import EventsError
from events.topics import ensure_topics
from infra import temporal
from infra.fleet_file import FleetFile
from infra.local.ports import accepts
from infra.local.status import FleetStatus
from infra.settings import FleetDownError, Settings
from model.names import CLUSTER_TASK_QUEUE, JOB_TASK_QUEUE
from model.units import counted
from proxy_runtime.errors import ErgoError

if TYPE_CHECKING:
    from temporalio.client import Client

    from model.records import NodeRecord

_POLL_S = 0.1
# So often may a process end while the fleet comes up before that is taken for its way.
_ENDS = 3
_TAIL_BYTES = 64 << 10


class _Progress(Protocol):
    def parts(self, names: tuple[str, ...]) -> None: ...
    def done(self, part: str, detail: str) -> None: ...


def await_healthy(
    settings: Settings,
    fleet: FleetFile,
    progress: _Progress,
    *,
    alive: Callable[[], bool],
    since: float,
    deadline_s: float,
) -> None:
    """Blocks until Temporal, Kafka and both workers serve, and every node has registered.

    Args:
        settings: of the fleet.
        fleet: what should be there.
        progress: told of every part.
        alive: whether the supervisor is.
        since: UNIX time; workers and nodes of before do not count.
        deadline_s: seconds.

    Raises:
        ErgoError: ``fleet.part``: a process ends again and again; ``fleet.late``: the time is over. The message holds
            the last words of the part.
    """
    asyncio.run(_Watch(settings, fleet, progress, alive, since).run(deadline_s))


class _Watch:
    def __init__(
        self, settings: Settings, fleet: FleetFile, progress: _Progress, alive: Callable[[], bool], since: float
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._progress = progress
        self._alive = alive
        self._since = since
        self._client: Client | None = None
        self._connected = asyncio.Event()
        self._waiting: dict[str, str] = {}

    async def run(self, deadline_s: float) -> None:
        nodes = await asyncio.to_thread(self._nodes)
        parts: dict[str, tuple[str, Awaitable[str]]] = {
            "Temporal": ("temporal", self._temporal()),
            "Kafka": ("kafka", self._kafka()),
            "scheduler": ("cluster-worker", self._worker(CLUSTER_TASK_QUEUE)),
            "job worker": ("job-worker", self._worker(JOB_TASK_QUEUE)),
            **{name: (name, self._node(name, nodes.get(name))) for name in self._fleet.node_names},
        }
        self._waiting = {part: child for part, (child, _) in parts.items()}
        self._progress.parts(tuple(parts))
        watching = asyncio.create_task(self._watch(time.monotonic() + deadline_s))
        waiting = [asyncio.create_task(self._part(part, wait)) for part, (_, wait) in parts.items()]
        everything = asyncio.gather(*waiting)
        try:
            await asyncio.wait({watching, everything}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            await everything
        finally:
            watching.cancel()
            everything.cancel()
            await asyncio.gather(watching, *waiting, return_exceptions=True)

    async def _part(self, part: str, wait: Awaitable[str]) -> None:
        detail = await wait
        del self._waiting[part]
        self._progress.done(part, detail)

    async def _temporal(self) -> str:
        await self._port(self._fleet.temporal_port)
        while True:
            try:
                client = await self._settings.connect_temporal()
            except FleetDownError:
                await asyncio.sleep(_POLL_S)
                continue
            if await temporal.healthy(client):
                break
        if self._fleet.temporal_port is None:
            await temporal.register_search_attributes(client)
        self._client = client
        self._connected.set()
        return self._fleet.temporal_address

    async def _kafka(self) -> str:
        await self._port(self._fleet.kafka_port)
        while True:
            try:
                await asyncio.to_thread(ensure_topics, self._settings.kafka())
            except EventsError as error:
                if self._fleet.kafka_port is None:
                    raise ErgoError(error.message, code=error.code, remedy=error.remedy) from error
                await asyncio.sleep(_POLL_S)
                continue
            return self._fleet.kafka_bootstrap_servers

    async def _worker(self, queue: str) -> str:
        await self._connected.wait()
        assert self._client is not None
        while not await temporal.has_workers(self._client, queue, since=self._since):
            await asyncio.sleep(_POLL_S)
        return f"task queue {queue}"

    async def _node(self, name: str, before: NodeRecord | None) -> str:
        await self._port(self._fleet.temporal_port)
        while True:
            record = (await asyncio.to_thread(self._nodes)).get(name)
            fresh = record is not None and (before is None or (before.node, before.beat) != (record.node, record.beat))
            if record is not None and fresh and not (record.left or record.lost):
                return f"{record.node}, {counted(len(record.devices), 'device')}"
            await asyncio.sleep(_POLL_S)

    def _nodes(self) -> dict[str, NodeRecord]:
        return {record.node.name: record for record in self._settings.fleet_store().nodes()}

    async def _port(self, port: int | None) -> None:
        while port is not None and not await asyncio.to_thread(accepts, port):
            await asyncio.sleep(_POLL_S)

    async def _watch(self, deadline: float) -> None:
        """Raises as soon as waiting has become pointless."""
        while True:
            await asyncio.sleep(_POLL_S)
            if not self._alive():
                raise self._broken("The fleet's supervisor has ended", "supervisor", "fleet.part")
            status = FleetStatus.read(self._settings.fleet_dir)
            for part, name in self._waiting.items():
                child = status.child(name) if status else None
                if child is not None and child.starts > _ENDS:
                    raise self._broken(f"The {part} ends again and again ({child.last_end})", name, "fleet.part")
            if time.monotonic() > deadline:
                part, name = next(iter(self._waiting.items()))
                raise self._broken(f"The {part} did not come up in time", name, "fleet.late")

    def _broken(self, what: str, name: str, code: str) -> ErgoError:
        path = self._settings.fleet_dir / "logs" / f"{name}.log"
        words = last_words(path)
        return ErgoError(
            f"{what}: {words}." if words else f"{what}.",
            code=code,
            remedy="See its log with `ERGO_LOG_LEVEL=debug ergo up`, and `ergo doctor` for what this machine lacks.",
        )


def last_words(path: Path) -> str:
    """The last line of a log that says something, without a full stop."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    try:
        record = orjson.loads(line)
        line = str(record.get("error") or record.get("exception") or record.get("event") or line)
    except (orjson.JSONDecodeError, AttributeError):
        pass
    return line.splitlines()[-1][:300].rstrip(".") if line else ""
