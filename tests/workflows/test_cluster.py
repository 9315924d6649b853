"""The cluster's scheduler on a real Temporal server, with jobs that obey it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import stamina
from temporalio.client import Client, WorkflowHandle, WorkflowHistory
from temporalio.worker import Replayer, Worker

from activities.cluster import ClusterActivities
from activities.snapshots import Snapshots
from infra.cluster_worker import cluster_worker
from infra.converter import DATA_CONVERTER
from infra.job_worker import workflow_runner
from model.cluster import ClusterView
from model.job_spec import Tier
from model.job_state import JobPhase
from model.names import Query, Signal, cluster_workflow_id
from proxy_runtime.storage.blobs import Bucket
from proxy_runtime.storage.fleet import FleetStore
from scheduling import constants
from tests.infra.fixtures import new_temporal
from tests.scheduling.builders import node
from tests.workflows.cluster_jobs import FakeJob, FakeJobInput, Floor
from workflows.cluster import ClusterScheduler

_numbers = itertools.count(1)


async def until(condition: Callable[[], object], what: str, deadline_s: float = 60.0):
    """Polls until `condition`, a plain or a coroutine function, gives something true; returns it."""
    async with asyncio.timeout(deadline_s):
        while True:
            found = condition()
            found = await found if asyncio.iscoroutine(found) else found
            if found:
                return found
            await asyncio.sleep(0.05)
    raise AssertionError(what)


@dataclass
class Lab:
    """A cluster of a name and queues of its own."""

    client: Client
    store: FleetStore
    cluster: str
    queue: str
    floor: Floor
    activities: ClusterActivities

    @property
    def handle(self) -> WorkflowHandle:
        return self.client.get_workflow_handle(cluster_workflow_id(self.cluster))

    async def nodes(self, *nodes) -> None:
        await self.activities.inbox(self.cluster).tell(*nodes)

    async def submit(self, name: str, ranks: int, tier: str = "basic", work_s: float = 3600.0) -> WorkflowHandle:
        return await self.client.start_workflow(
            FakeJob.run,
            FakeJobInput(self.cluster, self.queue, ranks, Tier(tier), work_s),
            id=f"{name}-{self.cluster}",
            task_queue=f"jobs-{self.cluster}",
        )

    async def show(self) -> ClusterView:
        return await self.handle.query(Query.SHOW, result_type=ClusterView)

    def owners(self) -> dict[str, int]:
        """How many devices each job stands on."""
        found: dict[str, int] = {}
        for job in self.floor.owner.values():
            name = job.removesuffix(f"-{self.cluster}")
            found[name] = found.get(name, 0) + 1
        return found

    def state(self):
        return Snapshots(self.store, self.cluster).newest()


@asynccontextmanager
async def lab(
    client: Client, directory: Path, *, scheduler: bool = True, queue: str = "", name: str = ""
) -> AsyncIterator[Lab]:
    number = next(_numbers)
    cluster = name or f"c{os.getpid()}-{number}"
    queue = queue or f"cluster-{cluster}"
    store = FleetStore(Bucket.open(directory.as_uri()), secrets.token_bytes(32))
    activities = ClusterActivities(client, store, queue=queue)
    floor = Floor()
    jobs = Worker(
        client,
        task_queue=f"jobs-{cluster}",
        workflows=[FakeJob],
        activities=[floor.take, floor.give],
        workflow_runner=workflow_runner(),
    )
    made = Lab(client, store, cluster, queue, floor, activities)
    async with jobs:
        if scheduler:
            async with cluster_worker(client, activities, queue=queue):
                yield made
        else:
            yield made


@pytest.fixture
async def client(temporal_server: str) -> Client:
    return await connect(temporal_server)


async def connect(address: str) -> Client:
    """A server listens a moment before it is healthy."""
    async for attempt in stamina.retry_context(on=RuntimeError, timeout=60, attempts=None, wait_max=0.5):
        with attempt:
            return await Client.connect(address, data_converter=DATA_CONVERTER)
    raise AssertionError("unreachable")


@pytest.fixture(autouse=True)
def short_cool_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests on a real clock do not wait for what protects real checkpoints."""
    live = constants.LIVE
    monkeypatch.setattr("scheduling.bridge.LIVE", replace(live, again_s=0.2, cool_s=(0.0, 0.2, 0.2, 0.2)))


async def test_premium_preempts_and_basic_resumes(client: Client, tmp_path: Path, golden: Path):
    async with lab(client, tmp_path) as cluster:
        await cluster.nodes(node("node-1"), node("node-2"))
        basic = await cluster.submit("gpt", 2)
        await until(lambda: cluster.owners() == {"gpt": 2}, "the basic job runs")
        premium = await cluster.submit("cnn", 4, "premium")
        await until(lambda: cluster.owners() == {"cnn": 4}, "the premium job has all devices")
        told = await basic.query(Query.EXPLAIN)
        assert any(
            reason.startswith("preempt: Basic job gpt") and "needs 4 devices, 2 are free" in reason for reason in told
        )
        await premium.signal(FakeJob.finish)
        await until(lambda: cluster.owners() == {"gpt": 2}, "the basic job is back")
        await basic.signal(FakeJob.finish)
        await asyncio.gather(basic.result(), premium.result())
        await until(lambda: not cluster.state().jobs, "the scheduler has nothing left")
        assert not cluster.floor.doubled
        view = await cluster.show()
        assert (view.waiting_batches, view.undelivered) == (0, 0)
        assert cluster.state().to_json() == cluster.store.get_snapshot(cluster.cluster, view.digest)
        history = (await cluster.handle.fetch_history()).to_json()
        if os.environ.get("ERGO_WRITE_GOLDEN"):
            target = golden / "histories" / "cluster" / "preempt_and_resume.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            told = re.sub(r'"identity": "[^"]*"', '"identity": "cluster-worker"', history)
            target.write_text(json.dumps(json.loads(told), separators=(",", ":")) + "\n")
        await replay(history)


def goldens() -> list[Path]:
    return sorted((Path(__file__).parents[1] / "golden" / "histories" / "cluster").glob("*.json"))


@pytest.mark.parametrize("path", goldens(), ids=lambda path: path.stem)
async def test_golden_histories_replay(path: Path):
    """Schedulers that are running now go on under tomorrow's code. Rewrite: ERGO_WRITE_GOLDEN=1 and the test above."""
    await replay(path.read_text())


def test_there_are_golden_histories():
    assert goldens()


async def replay(history: str) -> None:
    replayer = Replayer(workflows=[ClusterScheduler], data_converter=DATA_CONVERTER, workflow_runner=workflow_runner())
    await replayer.replay_workflow(WorkflowHistory.from_json("cluster/golden", history))


async def test_a_terminated_job_gives_its_devices_back(client: Client, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("scheduling.ledger.DRAIN_S", 0.0)
    async with lab(client, tmp_path) as cluster:
        await cluster.nodes(node("node-1"))
        first = await cluster.submit("gpt", 2)
        await until(lambda: cluster.owners() == {"gpt": 2}, "it runs")
        # One that is being started is not preempted, and nobody here looks for workflows that are gone.
        await until(
            lambda: any(job.notice.phase is JobPhase.RUNNING for job in cluster.state().jobs), "the scheduler knows it"
        )
        await first.terminate()
        cluster.floor.owner.clear()
        second = await cluster.submit("cnn", 2, "premium")
        # Preempting the terminated one finds that it is gone; its node says that nothing is left.
        await until(lambda: cluster.state().draining, "the scheduler knows")
        await cluster.nodes(node("node-1"))
        await until(lambda: cluster.owners() == {"cnn": 2}, "the next one runs")
        await second.signal(FakeJob.finish)
        await second.result()


@pytest.mark.slow
async def test_continue_as_new_under_load(client: Client, tmp_path: Path):
    async with lab(client, tmp_path) as cluster:
        await cluster.nodes(node("node-1"), node("node-2"))
        tiers = itertools.cycle(["basic", "standard", "premium"])
        jobs = [await cluster.submit(f"job-{index}", 1 + index % 4, next(tiers), work_s=0.3) for index in range(12)]
        runs = set()

        async def renew() -> None:
            while True:
                await cluster.handle.signal(Signal.RENEW)
                runs.add((await cluster.handle.describe()).run_id)
                await asyncio.sleep(0.3)

        renewing = asyncio.create_task(renew())
        await asyncio.wait_for(asyncio.gather(*(job.result() for job in jobs)), 120)
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        assert not cluster.floor.doubled
        assert len(runs) >= 3, "it has continued as new"
        await until(lambda: not cluster.state().jobs, "every notice was folded in")
        view = await cluster.show()
        assert view.tick == cluster.state().tick, "no tick was lost or done twice"


async def test_a_scheduler_that_was_terminated_goes_on_from_its_newest_snapshot(client, tmp_path, monkeypatch):
    monkeypatch.setattr("scheduling.ledger.SETTLE_S", 1.0)
    async with lab(client, tmp_path) as cluster:
        await cluster.nodes(node("node-1"), node("node-2"))
        first = await cluster.submit("gpt", 4)
        await until(lambda: cluster.owners() == {"gpt": 4}, "it runs")
        await until(lambda: not any(job.told for job in cluster.state().jobs), "the scheduler knows that it runs")
        await cluster.handle.terminate()
        second = await cluster.submit("next", 1)
        await until(lambda: cluster.state().settle_until is not None, "it is restored")
        await until(lambda: cluster.state().settle_until is None, "it has settled")
        assert cluster.owners() == {"gpt": 4}
        await first.signal(FakeJob.finish)
        await until(lambda: cluster.owners() == {"next": 1}, "the next one runs")
        await second.signal(FakeJob.finish)
        await asyncio.gather(first.result(), second.result())
        assert not cluster.floor.doubled


@pytest.mark.slow
async def test_the_worker_is_killed_again_and_again(tmp_path: Path):
    """The real process, killed at any moment: nothing is lost or doubled, and all jobs end."""
    server = new_temporal(tmp_path / "temporal")
    await asyncio.to_thread(server.start)
    (tmp_path / "secret").write_bytes(secrets.token_bytes(32))
    store = tmp_path / "store"
    store.mkdir()
    environment = os.environ | {
        "ERGO_FLEET_DIR": str(tmp_path / "fleet"),
        "ERGO_STORE_URL": store.as_uri(),
        "ERGO_SECRET_FILE": str(tmp_path / "secret"),
        "ERGO_CLUSTER": "local",
        "ERGO_KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:9",
        "TEMPORAL_ADDRESS": server.address,
    }
    log = (tmp_path / "worker.log").open("ab")

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "infra.cluster_worker"], env=environment, stderr=log)

    worker = start()
    try:
        client = await connect(server.address)
        async with lab(client, store, scheduler=False, queue="ergo-cluster", name="local") as cluster:
            await cluster.nodes(node("node-1", 4), node("node-2", 4))
            tiers = itertools.cycle(["basic", "premium", "standard"])
            jobs = [await cluster.submit(f"job-{index}", 1 + index % 5, next(tiers), work_s=1.0) for index in range(16)]
            for pause_s in (2.5, 3.1, 2.8, 3.7):
                await asyncio.sleep(pause_s)
                worker.send_signal(signal.SIGKILL)
                worker.wait()
                worker = start()
            await asyncio.wait_for(asyncio.gather(*(job.result() for job in jobs)), 200)
            assert not cluster.floor.doubled
            await until(lambda: not cluster.state().jobs, "every notice was folded in")
    finally:
        worker.terminate()
        assert worker.wait(30) == 0, (tmp_path / "worker.log").read_text()[-3000:]
        server.kill()
        log.close()


def test_constants_are_what_the_tests_replace():
    assert {constants.COOL_DOWN_S, constants.DRAIN_S, constants.SETTLE_S} == {5.0, 10.0, 15.0}
