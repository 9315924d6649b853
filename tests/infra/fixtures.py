"""Real servers for every test: `temporal_server` and `kafka_broker`, one of each a session, started when first used.

Both are imported by tests/conftest.py, so that no test starts its own. Names of workflows, queues and keys must be
unique to a test, since all share them. `TEMPORAL_ADDRESS` and `ERGO_*` are not set: pass what is needed.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from temporalio.client import Client

from events.connection import KafkaConnection
from events.topics import ensure_topics
from infra import kafka, temporal
from infra.local.ports import HOST, accepts, free_port
from infra.local.processes import die_with_parent


@dataclass
class Server:
    """A server process on a directory of its own; `kill` and `start` keep its port and data."""

    directory: Path
    port: int
    command: Sequence[str]
    others: dict[str, int] = field(default_factory=dict)
    serves: Callable[[], bool] | None = None
    """Whether it answers requests, asked once its port accepts; None: whoever has a port open serves."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def start(self, deadline_s: float = 90.0) -> None:
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
        until(lambda: self._ended() or self._answers(), deadline_s, f"a server at {self.address}")
        assert not self._ended(), (self.directory / "log").read_text()[-2000:]

    def _ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def _answers(self) -> bool:
        return accepts(self.port) and (self.serves is None or self.serves())

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(60)


def until(condition, deadline_s: float = 30.0, what: str = "a condition"):
    """Polls until `condition` gives something true, and returns that."""
    deadline = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {deadline_s} s for {what}"
        time.sleep(0.05)
    return found


def new_temporal(directory: Path) -> Server:
    """A Temporal server that has not been started."""
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    ui = free_port({port})
    serves = lambda: asyncio.run(_temporal_serves(f"{HOST}:{port}"))  # noqa: E731
    return Server(directory, port, temporal.command(directory, port, ui), {"ui": ui}, serves)


async def _temporal_serves(address: str) -> bool:
    # Its port is open a moment before its services are up; until then a connection is refused in words.
    try:
        return await temporal.healthy(await Client.connect(address))
    except RuntimeError:
        return False


def new_kafka(directory: Path) -> Server:
    """A formatted broker that has not been started."""
    java, jars = kafka.java(), kafka.jars()
    port = free_port()
    kafka.prepare(java, jars, directory, port, free_port({port}))
    return Server(directory, port, kafka.command(java, jars, directory))


@contextmanager
def temporal_at(directory: Path) -> Iterator[str]:
    """A Temporal server of one's own, by its address.

    The SDK's `WorkflowEnvironment.start_local` gives one up that does not serve within 5 s: too soon on a busy machine.
    """
    server = new_temporal(directory)
    server.start()
    yield server.address
    server.kill()


@pytest.fixture(scope="session")
def temporal_server(tmp_path_factory) -> Iterator[str]:
    """Address of a Temporal server with our search attributes; namespace `default`."""
    with temporal_at(tmp_path_factory.mktemp("temporal")) as address:
        yield address


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory) -> Iterator[KafkaConnection]:
    """A broker that has all our topics."""
    if shutil.which("java") is None:
        pytest.skip("no Java on this machine")
    server = new_kafka(tmp_path_factory.mktemp("kafka"))
    server.start()
    connection = KafkaConnection((server.address,))
    ensure_topics(connection)
    yield connection
    server.kill()
