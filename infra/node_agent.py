"""The agent of a node: its lease, its peer, and a Temporal worker for what jobs ask of it.

    python -m infra.node_agent --name node-1 --dir DIR --devices 2 [--bind HOST]

Everything it owns is on disk and in shims: killed and started again on the same directory it goes on where it was, and
jobs do not notice. SIGTERM and SIGINT end the agent and leave jobs alone, unless `--end-jobs` is given. Exit code 3
means that this incarnation of the node was given up or taken over, and everything of it has been ended.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import stamina
import structlog

from activities.fates import TemporalFates
from activities.node import NodeActivities
from infra import logs
from infra.housekeeping import regularly
from infra.incidents import IncidentTeller
from infra.node_setup import end_parts, node_record
from infra.settings import FleetDownError, Settings
from model.errors import ModelError
from model.names import node_task_queue
from model.records import NodeRecord
from model.runtime import StopInput
from proxy_runtime.errors import ErgoError
from proxy_runtime.node.lease import Lease, claim, lock_directory
from proxy_runtime.node.runtime import LocalNodeRuntime
from proxy_runtime.node.serving import routes
from proxy_runtime.storage.fleet import FleetStore
from proxy_runtime.storage.peer import PeerServer

if TYPE_CHECKING:
    from temporalio.client import Client

SUPERSEDED = 3
ORPHAN_S = 10.0
_LOOK_S = 2.0
_WORK_ENDS_S = 15.0  # more than the worker's own patience; what hangs then ends with the process
_THREADS = 128  # activities at one time: an `attend` for each part, and the short calls

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """How an agent is started.

    Attributes:
        name: of the node; unique in the fleet.
        directory: what the node owns.
        devices: number of CPU accelerators.
        bind: address to listen on and to tell the other nodes.
        lease_s: seconds without a renewal after which the node counts as lost.
        free_bytes: with fewer on its disk no checkpoint is begun.
        end_jobs: on SIGTERM its jobs are ended as well, and the record says that the node has left.
    """

    name: str
    directory: Path
    devices: int
    bind: str = "127.0.0.1"
    lease_s: float = 10.0
    end_jobs: bool = False
    free_bytes: int = 0


@dataclass(slots=True)
class NodeAgent:
    """One run of an agent.

    Attributes:
        renewed: called with every renewed record, in the lease's thread; it must not block.
    """

    options: AgentOptions
    fleet: FleetStore
    cluster: str
    connect: Callable[[], Awaitable[Client]]
    renewed: Callable[[NodeRecord], None] = lambda _record: None
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    _superseded: str = ""

    async def run(self) -> int:
        """Blocks until the agent is told to end; returns its exit code."""
        options = self.options
        lock_directory(options.directory)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._over.set)
        found: list[LocalNodeRuntime] = []  # the address comes first: it is part of the record that names the node
        peer = PeerServer(
            self.fleet.peer_token,
            lambda tenant: self.fleet.node_store(options.directory / "store", tenant),
            routes=routes(lambda: found[0] if found else None),
            host=options.bind,
        )
        address = await asyncio.to_thread(peer.start)
        wanted = await asyncio.to_thread(
            node_record, options.name, self.cluster, address, options.devices, options.lease_s
        )
        record, same = await asyncio.to_thread(claim, self.fleet, wanted, options.directory)
        structlog.contextvars.bind_contextvars(node=str(record.node))
        runtime = LocalNodeRuntime(
            record.node,
            options.directory,
            self.fleet,
            host=options.bind,
            devices=record.devices,
            free_bytes=options.free_bytes,
        )
        if not same:
            await asyncio.to_thread(runtime.end_everything, "Another incarnation of the node begins.")
        _log.info("claimed", same=same, address=record.address, parts=[str(on.job) for on in runtime.jobs()])
        found.append(runtime)
        lease = Lease(self.fleet, record, runtime, self._end_superseded(loop), self.renewed)
        lease.start()
        working = asyncio.create_task(self._work(record, runtime))
        await self._over.wait()
        return await self._end(runtime, lease, working, peer.stop)

    async def _end(
        self, runtime: LocalNodeRuntime, lease: Lease, working: asyncio.Task[None], close: Callable[[], None]
    ) -> int:
        # `ergo down` tells by a file: the agent was started long before anybody knew how it would end.
        leaves = self.options.end_jobs or Settings.load().going_down()
        ending = bool(self._superseded) or leaves
        _log.info("ends", superseded=self._superseded, jobs="ended" if ending else "left running")
        reason = self._superseded or "The node leaves the fleet."
        working.cancel()
        if ending:
            # Calls that wait for other nodes, such as a start's for its peers, give up only when their part is ended.
            await asyncio.to_thread(runtime.end_everything, reason)
        await asyncio.wait((working,), timeout=_WORK_ENDS_S)
        if ending:  # what a call under way has begun meanwhile
            await asyncio.to_thread(runtime.end_everything, reason)
        try:
            await asyncio.to_thread(lease.stop, left=leaves and not self._superseded)
        except ErgoError as error:
            _log.warning("the record does not say that the node has left", error=str(error))
        close()
        return SUPERSEDED if self._superseded else 0

    def _end_superseded(self, loop: asyncio.AbstractEventLoop) -> Callable[[str], None]:
        def superseded(reason: str) -> None:
            self._superseded = reason
            loop.call_soon_threadsafe(self._over.set)

        return superseded

    async def _work(self, record: NodeRecord, runtime: LocalNodeRuntime) -> None:
        """Connects to Temporal, again whenever the worker fails: an outage of it ends nothing here."""
        async for attempt in stamina.retry_context(on=Exception, attempts=None, timeout=None, wait_max=5.0):
            with attempt:
                client: Client = await self.connect()
                await self._work_with(client, record, runtime)

    async def _work_with(self, client: Client, record: NodeRecord, runtime: LocalNodeRuntime) -> None:
        from temporalio.worker import Worker

        fates = TemporalFates(client)

        def tidy() -> None:
            runtime.tidy(lambda job: fates.closed(job) is not None)

        activities = NodeActivities(runtime, fates, runtime.transferred)
        with ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="activity") as executor:
            worker = Worker(
                client,
                task_queue=node_task_queue(record.node),
                activities=activities.all,
                activity_executor=executor,
                max_concurrent_activities=_THREADS,
                max_heartbeat_throttle_interval=timedelta(seconds=1),
                default_heartbeat_throttle_interval=timedelta(seconds=1),
                graceful_shutdown_timeout=timedelta(seconds=10),
            )
            _log.info("works", queue=node_task_queue(record.node))
            async with asyncio.TaskGroup() as group:
                group.create_task(worker.run())
                group.create_task(self._end_orphans(fates, runtime))
                group.create_task(IncidentTeller(client, record.node, runtime.parts.all).run())
                group.create_task(regularly(partial(asyncio.to_thread, tidy), "the chunk store was not tidied"))

    async def _end_orphans(self, fates: TemporalFates, runtime: LocalNodeRuntime) -> None:
        """Parts that nobody attends: their workflow may have been closed while the agent was away."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for part in runtime.parts.all():
                if part.unattended_s < ORPHAN_S:
                    continue
                how = await fates.ask(part.job, first_run=part.record.first_run)
                if how is None:
                    continue
                _log.warning("orphaned", job=str(part.job), epoch=int(part.epoch), workflow=how)
                try:
                    stop = StopInput(part.job, part.epoch, f"The job's workflow is {how}.")
                    await asyncio.to_thread(runtime.stop, stop)
                except ErgoError as error:
                    _log.error("an orphan is not ended", job=str(part.job), error=str(error))


def main(arguments: list[str] | None = None) -> int:
    """Entry point; errors are one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m infra.node_agent", description="Run the agent of a node.")
    parser.add_argument("--name", required=True, help="name of the node, unique in the fleet")
    parser.add_argument("--dir", required=True, type=Path, help="what the node owns; no other node reads it")
    parser.add_argument("--devices", type=int, default=1, help="CPU accelerators")
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen on, as other nodes reach it")
    parser.add_argument("--lease", type=float, default=10.0, help="seconds until the node counts as lost")
    leaving = parser.add_mutually_exclusive_group()
    leaving.add_argument("--leave-jobs", action="store_true", help="on SIGTERM jobs run on (the default)")
    leaving.add_argument("--end-jobs", action="store_true", help="on SIGTERM jobs are ended and the node leaves")
    parser.add_argument("--end-all", action="store_true", help="only end all that is left in the directory")
    given = parser.parse_args(arguments)
    logs.configure("node-agent")
    directory = given.dir.expanduser().absolute()
    options = AgentOptions(given.name, directory, given.devices, given.bind, given.lease, given.end_jobs)
    try:
        if given.end_all:
            end_parts(directory)
            return 0
        code = asyncio.run(_serve(options))
    except (ErgoError, ModelError) as error:
        print(error, file=sys.stderr)
        return 1
    sys.stderr.flush()
    os._exit(code)  # threads that wait for jobs must not keep the process


async def _serve(options: AgentOptions) -> int:
    settings = Settings.load()
    agent = NodeAgent(
        replace(options, free_bytes=settings.free_bytes),
        settings.fleet_store(),
        settings.cluster,
        lambda: settings.connect_temporal(identity=f"node-agent/{options.name}"),
        _telemetry(settings, options.directory),
    )
    return await agent.run()


def _telemetry(settings: Settings, directory: Path) -> Callable[[NodeRecord], None]:
    """Reports of the node to Kafka, with every renewal of its lease; none where there is no Kafka."""
    from events.telemetry import Telemetry, node_report

    try:
        connection = settings.kafka()
    except FleetDownError:
        _log.warning("no Kafka is known, so nothing is reported")
        return lambda _record: None
    started: list[Telemetry] = []

    def renewed(record: NodeRecord) -> None:
        if not started:
            started.append(Telemetry(connection, record.cluster, record.node))
        started[0].report(lambda: node_report(record.node, record.devices, record.jobs, directory))

    return renewed


if __name__ == "__main__":
    raise SystemExit(main())
