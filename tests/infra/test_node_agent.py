"""The agent as a process of its own, with a real Temporal, a real store and real jobs: killed, restarted, given up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.common import RetryPolicy
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from infra.converter import DATA_CONVERTER
from model.control import AdvanceHeadInput, AllocateEpochInput, OpenJobInput
from model.ids import DeviceId, Epoch, JobId, NodeId
from model.job_spec import parse_job_spec
from model.names import node_task_queue
from model.placement import Placement
from model.records import NodeRecord
from model.runtime import AttendInput, AttendResult, Outcome
from proxy_runtime.home import ergo_home
from proxy_runtime.node.starting import START_S
from proxy_runtime.shim import remains
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.part_client import PartClient
from proxy_runtime.storage import Bucket, FleetStore
from tests.infra.fixtures import temporal_at

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "tests" / "jobs"
SECRET = b"s" * 32
QUEUE = "probes"
DEADLINE_S = 90.0

pytestmark = pytest.mark.slow


@workflow.defn(name="AgentProbe")
class AgentProbe:
    """Attends one part of a job, as the job's workflow does."""

    @workflow.run
    async def run(self, request: AttendInput) -> AttendResult:
        return await workflow.execute_activity(
            "attend",
            request,
            result_type=AttendResult,
            task_queue=node_task_queue(request.node),
            heartbeat_timeout=timedelta(seconds=5),
            start_to_close_timeout=timedelta(minutes=10),
            retry_policy=RetryPolicy(
                initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=1)
            ),
        )


class Node:
    """An agent's directory and process."""

    def __init__(self, root: Path, temporal: str) -> None:
        self.directory = root / "node"
        self.log = root / "agent.log"
        (root / "secret").write_bytes(SECRET)
        self.fleet = FleetStore(Bucket.open(f"file://{root}/store"), SECRET)
        self._environment = {
            **os.environ,
            "ERGO_HOME": str(ergo_home()),
            "ERGO_FLEET_DIR": str(root),
            "ERGO_STORE_URL": f"file://{root}/store",
            "ERGO_SECRET_FILE": str(root / "secret"),
            "TEMPORAL_ADDRESS": temporal,
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        command = [sys.executable, "-m", "infra.node_agent", "--name", "node-1", "--dir", str(self.directory)]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*command, "--devices", "2", "--lease", "2", *more], cwd=ROOT, env=self._environment, stderr=log
            )

    def signal(self, number: int, expected: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        assert self.process.wait(30) == expected, self.words()

    def record(self) -> NodeRecord | None:
        return self.fleet.node("node-1")

    async def renewed(self) -> NodeRecord:
        """The record, once this process has renewed it."""
        before = self.record()
        beat = before.beat + 1 if before else 1  # a claim is one beat, a renewal the next
        await until(lambda: (found := self.record()) is not None and found.beat > beat, self.words)
        found = self.record()
        assert found is not None
        return found

    def layouts(self) -> list[RunLayout]:
        return [layout for layout, _ in RunLayout.parts_in(self.directory / "runs")]

    def words(self) -> str:
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for layout in self.layouts():
            PartClient(layout).end()
            for name in (layout.job_id, f"{layout.job_id}.d"):
                path = Path("/run/ergo") / name
                if path.exists():
                    path.rmdir()


async def until(condition: Callable[[], bool | Awaitable[bool]], words: Callable[[], str] = lambda: "") -> None:
    limit = time.monotonic() + DEADLINE_S
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        assert time.monotonic() < limit, f"it did not happen in time\n{words()}"
        await asyncio.sleep(0.1)


@pytest.fixture
def temporal(tmp_path: Path) -> Iterator[str]:
    with temporal_at(tmp_path / "temporal") as address:
        yield address


@pytest.fixture
async def client(temporal: str) -> AsyncIterator[Client]:
    client = await Client.connect(temporal, data_converter=DATA_CONVERTER)
    async with Worker(client, task_queue=QUEUE, workflows=[AgentProbe], workflow_runner=UnsandboxedWorkflowRunner()):
        yield client


@pytest.fixture
def node(tmp_path: Path, client: Client) -> Iterator[Node]:
    made = Node(tmp_path, client.service_client.config.target_host)
    yield made
    made.close()


async def begin(
    client: Client, node: Node, job: str, record: NodeRecord, epochs: int, other: DeviceId | None = None
) -> WorkflowHandle[Any, Any]:
    """A job of two ranks on the node's two devices, or one of them and another node's, with its workflow."""
    script = str(JOBS / "ddp_skew.py")
    spec = parse_job_spec(
        {"apiVersion": "ergosphere/v1", "argv": ["python", script, "--epochs", str(epochs)], "ranks": 2}
    )
    first, second = (device.id for device in record.devices)
    placement = Placement(Epoch(1), (first, other or second), (0, 1))
    # The workflow's run is what the head names: give the id first, then open the head, as open_job does.
    request = AttendInput(JobId(job), Epoch(1), record.node, spec, placement, "fresh")
    handle = await client.start_workflow(
        "AgentProbe", request, id=job, task_queue=QUEUE, result_type=AttendResult, start_delay=timedelta(seconds=1)
    )
    run = handle.first_execution_run_id
    assert run is not None
    node.fleet.open_job(OpenJobInput(JobId(job), spec.tenant, run, run))
    node.fleet.allocate_epoch(AllocateEpochInput(JobId(job), run))
    node.fleet.advance_head(AdvanceHeadInput(JobId(job), run, Epoch(1), (record.node,)))
    return handle


async def running(node: Node, step: int = 1) -> None:
    """Until the record tells of a job that is at this step."""
    await until(lambda: (r := node.record()) is not None and any(on.step >= step for on in r.jobs), node.words)


def rank_pids(node: Node) -> dict[int, int]:
    (layout,) = node.layouts()
    return PartClient(layout).status().rank_pids


async def test_killed_and_started_again_it_finds_its_job_which_does_not_notice(client: Client, node: Node) -> None:
    node.start()
    record = await node.renewed()
    assert [str(device.id) for device in record.devices] == ["node-1@1/cpu-0", "node-1@1/cpu-1"]
    handle = await begin(client, node, "job-kill", record, epochs=8)
    await running(node, 2)
    assert node.process is not None
    maps = Path(f"/proc/{node.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    pids = rank_pids(node)
    node.signal(signal.SIGKILL, -signal.SIGKILL)
    (layout,) = node.layouts()
    step = PartClient(layout).status().step
    await until(lambda: PartClient(layout).status().step > step)  # it goes on alone
    node.start()
    again = await node.renewed()
    assert again.node == record.node
    assert rank_pids(node) == pids
    assert (await handle.result()).outcome is Outcome.COMPLETED
    # The workflow is over without a stop: the part lingers until nobody has asked for it for ten seconds.
    await until(lambda: node.layouts() == [], node.words)
    node.signal(signal.SIGTERM, 0)


async def test_a_job_that_was_terminated_while_the_agent_was_away_is_ended(client: Client, node: Node) -> None:
    node.start()
    handle = await begin(client, node, "job-orphan", await node.renewed(), epochs=1000)
    await running(node)
    node.signal(signal.SIGTERM, 0)
    (layout,) = node.layouts()
    assert PartClient(layout).alive, "an agent that ends leaves its jobs alone"
    await handle.terminate("in the UI")
    node.start()
    await until(lambda: node.layouts() == [] and not remains.processes(layout), node.words)


async def test_a_node_that_was_given_up_ends_what_it_has_and_begins_anew(client: Client, node: Node) -> None:
    node.start()
    record = await node.renewed()
    await begin(client, node, "job-lost", record, epochs=1000)
    await running(node)
    (layout,) = node.layouts()
    node.fleet.mark_lost(record.node)
    assert node.process is not None
    process = node.process
    await until(lambda: process.poll() is not None, node.words)
    assert process.returncode == 3, node.words()
    assert node.layouts() == [] and not remains.processes(layout)
    node.start("--end-jobs")
    assert (await node.renewed()).node.incarnation == 2
    node.signal(signal.SIGTERM, 0)
    left = node.record()
    assert left is not None and left.left


async def test_a_node_that_was_given_up_does_not_wait_for_the_peers_of_a_start(client: Client, node: Node) -> None:
    node.start()
    record = await node.renewed()
    away = DeviceId(NodeId("node-away", 1), ("cpu-0",))
    await begin(client, node, "job-waits", record, epochs=1000, other=away)
    await until(lambda: any(layout.events.exists() for layout in node.layouts()), node.words)
    node.fleet.mark_lost(record.node)
    assert node.process is not None
    assert await asyncio.to_thread(node.process.wait, START_S / 2) == 3, node.words()
    assert node.layouts() == []


async def test_its_peer_serves_logs_to_whoever_shows_the_token(client: Client, node: Node) -> None:
    node.start()
    record = await node.renewed()
    await begin(client, node, "job-logs", record, epochs=1000)
    await running(node)
    url = f"http://{record.address}/v1/jobs/job-logs/latest/logs/0"
    headers = {"authorization": f"Bearer {node.fleet.peer_token}"}
    async with httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(url)).status_code == 401
        await until(lambda: _has_lines(http, url, headers), node.words)
        whole = await http.get(url, headers=headers)
        part = await http.get(url, headers=headers, params={"offset": "3"})
        assert whole.content[3:].startswith(part.content[:10])
        assert whole.headers["ergo-ended"] == "0"
        assert (await http.get(url.replace("logs/0", "logs/7"), headers=headers)).status_code == 404
        jobs = (await http.get(f"http://{record.address}/v1/jobs", headers=headers)).json()
        assert [(on["job"], on["epoch"]) for on in jobs["jobs"]] == [("job-logs", 1)]


async def _has_lines(http: httpx.AsyncClient, url: str, headers: dict[str, str]) -> bool:
    return len((await http.get(url, headers=headers)).content) > 10


def test_a_directory_that_an_agent_has_is_refused_with_the_remedy(node: Node) -> None:
    from proxy_runtime.node.lease import lock_directory

    lock = lock_directory(node.directory)
    node.start()
    assert node.process is not None
    assert node.process.wait(60) == 1
    assert "Another node agent has the directory" in node.words()
    os.close(lock)
