"""The observer on a real Temporal server and a real store: nodes that are lost, jobs that are terminated."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
import stamina
from temporalio.client import Client

from infra.converter import DATA_CONVERTER
from infra.ends import Ends
from infra.observer import Observer
from model.control import JobClosed, JobNotice, NodeNotice
from model.ids import DeviceId, JobId, NodeId
from model.job_state import JobPhase
from model.names import JOB_WORKFLOW
from model.records import NodeDevice, NodeRecord
from proxy_runtime.errors import ErgoError
from proxy_runtime.storage.blobs import Bucket
from proxy_runtime.storage.fleet import FleetStore
from scheduling.state import ClusterState, JobState
from tests.scheduling.builders import CPU, device_ids, notice


class Words:
    """An inbox that keeps what it was told."""

    cluster = "c"

    def __init__(self) -> None:
        self.words: list[object] = []

    async def tell(self, *words: object) -> None:
        self.words += words


@pytest.fixture
async def client(temporal_server: str) -> Client:
    async for attempt in stamina.retry_context(on=RuntimeError, timeout=60, attempts=None, wait_max=0.5):
        with attempt:
            return await Client.connect(temporal_server, data_converter=DATA_CONVERTER)
    raise AssertionError("unreachable")


@pytest.fixture
def store(tmp_path: Path) -> FleetStore:
    return FleetStore(Bucket.open(tmp_path.as_uri()), secrets.token_bytes(32))


def observer(client, store, *, state=lambda: None, ended=lambda notice, how: None, clock=None):
    words = Words()
    made = Observer(client, store, words, state, Ends(store.bucket, "c", ended), **({"clock": clock} if clock else {}))  # type: ignore[arg-type]
    return made, words


async def test_a_node_that_falls_silent_is_marked_before_it_is_told(client, store):
    now = [0.0]
    made, words = observer(client, store, clock=lambda: now[0])
    node = NodeId("n", 1)
    device = NodeDevice(id=DeviceId(node, ("cpu-0",)), accelerator="cpu")
    record = NodeRecord(
        node=node, cluster="c", boot_id="b", address="127.0.0.1:1", devices=(device,), numerics=CPU, lease_s=2.0
    )
    record = store.claim_node(record)
    await made.look_at_nodes()
    record = store.renew_node(record)
    now[0] += 1
    await made.look_at_nodes()
    assert [word.alive for word in words.words if isinstance(word, NodeNotice)] == [True]
    for _ in range(5):
        now[0] += 1
        await made.look_at_nodes()
    assert [word.alive for word in words.words if isinstance(word, NodeNotice)] == [True, False]
    assert store.node("n").lost
    with pytest.raises(ErgoError):
        store.renew_node(record)


async def test_a_terminated_job_is_told_and_its_end_is_published(client, store):
    name = f"job-{secrets.token_hex(4)}"
    handle = await client.start_workflow(JOB_WORKFLOW, id=name, task_queue=f"nobody-{name}")
    run = handle.first_execution_run_id
    known = notice(name, 2, run=run, phase=JobPhase.RUNNING, devices=device_ids("n", 2), wants="nothing")
    state = ClusterState("c", jobs=(JobState(known),))
    tries: list[tuple[JobNotice, str]] = []

    def ended(last: JobNotice, how: str) -> None:
        tries.append((last, how))
        if len(tries) == 1:
            raise ErgoError("Kafka does not answer.", code="events.unreachable")

    made, words = observer(client, store, state=lambda: state, ended=ended)
    await made.look_at_closed()
    await made.reconcile()
    assert not words.words and not tries, "it runs"
    await handle.terminate("by a person")
    async for attempt in stamina.retry_context(on=AssertionError, timeout=30, attempts=None, wait_max=0.3):
        with attempt:  # visibility lags behind
            await made.look_at_closed()
            assert words.words
    assert words.words[0] == JobClosed(JobId(name), run, "terminated")
    assert tries == [(known, "terminated")]
    # Its process is killed before Kafka is back: the next one knows what is still to be published.
    state = ClusterState("c")
    after, _ = observer(client, store, state=lambda: state, ended=ended)
    await after.look_at_closed()
    assert tries[1:] == [(known, "terminated")], "told again until it is published"
    await after.look_at_closed()
    assert len(tries) == 2
