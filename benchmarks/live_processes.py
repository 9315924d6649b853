"""The processes of `scheduling.live`: Temporal's server, and the scheduler's worker that is killed again and again."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

from temporalio.client import Client

from benchmarks.harness import BenchmarkError
from infra import temporal
from infra.converter import DATA_CONVERTER
from infra.local.ports import HOST, free_port
from infra.local.processes import die_with_parent
from proxy_runtime.storage.blobs import Bucket
from proxy_runtime.storage.fleet import FleetStore

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = "local"


class Processes:
    """The server and the scheduler's worker, on a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = free_port()
        self.store = directory / "store"
        self.store.mkdir()
        self._secret = secrets.token_bytes(32)
        (directory / "secret").write_bytes(self._secret)
        self._server: subprocess.Popen[bytes] | None = None
        self._worker: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def fleet_store(self) -> FleetStore:
        return FleetStore(Bucket.open(self.store.as_uri()), self._secret)

    def start_server(self) -> None:
        data = self._directory / "temporal"
        data.mkdir()
        self._server = self._start(temporal.command(data, self.port, free_port({self.port})), "temporal.log", {})

    def start_worker(self) -> None:
        environment = {
            "ERGO_FLEET_DIR": str(self._directory / "fleet"),
            "ERGO_STORE_URL": self.store.as_uri(),
            "ERGO_SECRET_FILE": str(self._directory / "secret"),
            "ERGO_CLUSTER": CLUSTER,
            "ERGO_KAFKA_BOOTSTRAP_SERVERS": f"{HOST}:9",  # nothing is published: no workflow of a job is terminated
            "TEMPORAL_ADDRESS": self.address,
        }
        self._worker = self._start([sys.executable, "-m", "infra.cluster_worker"], "worker.log", environment)

    def kill_worker(self) -> None:
        assert self._worker is not None
        if self._worker.poll() is not None:
            raise BenchmarkError(f"the scheduler's worker has ended by itself: {self.tail('worker.log')}")
        self._worker.send_signal(signal.SIGKILL)
        self._worker.wait()

    def close(self) -> None:
        for process in (self._worker, self._server):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()

    def tail(self, name: str) -> str:
        return (self._directory / name).read_text()[-1000:]

    def _start(self, command: list[str], log: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self._directory / log).open("ab") as file:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | environment,
                stdout=file,
                stderr=file,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )


async def connect(address: str) -> Client:
    until = time.monotonic() + 60
    while True:
        try:
            client = await Client.connect(address, data_converter=DATA_CONVERTER)
            if await temporal.healthy(client):
                return client
        except RuntimeError:
            pass
        if time.monotonic() > until:
            raise BenchmarkError("Temporal's server does not answer.")
        await asyncio.sleep(0.2)
