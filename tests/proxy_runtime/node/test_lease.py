from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from model.ids import DeviceId, NodeId
from model.manifest import NumericsClass
from model.records import JobOnNode, NodeDevice, NodeRecord
from proxy_runtime.errors import ErgoError
from proxy_runtime.node.lease import Lease, claim, lock_directory
from proxy_runtime.storage.blobs import Bucket
from proxy_runtime.storage.fleet import FleetStore

LEASE_S = 0.5


class Jobs:
    """What a lease looks after; remembers what it was told."""

    def __init__(self) -> None:
        self.frozen: list[bool] = []
        self.fenced = 0

    def jobs(self) -> tuple[JobOnNode, ...]:
        return ()

    def end_fenced(self) -> None:
        self.fenced += 1

    def freeze(self, frozen: bool) -> None:
        self.frozen.append(frozen)


@pytest.fixture
def fleet(tmp_path: Path) -> FleetStore:
    return FleetStore(Bucket.open(f"file://{tmp_path}/store"), b"s" * 32)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


def record(boot: str = "boot-1") -> NodeRecord:
    node = NodeId("node-1", 1)
    return NodeRecord(
        node=node,
        cluster="local",
        boot_id=boot,
        address="127.0.0.1:1",
        devices=(NodeDevice(id=DeviceId(node, ("cpu-0",)), accelerator="cpu"),),
        numerics=NumericsClass(torch="2", device_model="cpu", instruction_set="AVX2", threads_per_device=1),
        lease_s=LEASE_S,
    )


def until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.01)


def test_an_agent_that_starts_again_keeps_its_incarnation(fleet: FleetStore, directory: Path) -> None:
    first, same = claim(fleet, record(), directory)
    assert (str(first.node), same) == ("node-1@1", False)
    again, same = claim(fleet, record(), directory)
    assert (str(again.node), same) == ("node-1@1", True)
    assert again.beat > first.beat


@pytest.mark.parametrize("why", ["boot", "lost", "left", "directory"])
def test_what_cannot_have_lived_on_gets_the_next_incarnation(fleet: FleetStore, directory: Path, why: str) -> None:
    first, _ = claim(fleet, record(), directory)
    boot = "boot-2" if why == "boot" else "boot-1"
    if why == "lost":
        fleet.mark_lost(first.node)
    elif why == "left":
        fleet.renew_node(first.model_copy(update={"left": True}))
    elif why == "directory":
        shutil.rmtree(directory)
        directory.mkdir()
    again, same = claim(fleet, record(boot), directory)
    assert (str(again.node), same) == ("node-1@2", False)
    assert [str(device.id) for device in again.devices] == ["node-1@2/cpu-0"]
    assert not again.left and not again.lost


def test_it_is_renewed_and_tells_so(fleet: FleetStore, directory: Path) -> None:
    told: list[NodeRecord] = []
    jobs = Jobs()
    claimed, _ = claim(fleet, record(), directory)
    lease = Lease(fleet, claimed, jobs, lambda reason: None, told.append)
    lease.start()
    until(lambda: len(told) >= 3 and jobs.fenced >= 2)
    lease.stop(left=True)
    assert told[2].beat > told[0].beat
    found = fleet.node("node-1")
    assert found is not None and found.left
    assert jobs.frozen == []


def test_an_incarnation_that_was_given_up_is_told_once_and_renews_no_more(fleet: FleetStore, directory: Path) -> None:
    claimed, _ = claim(fleet, record(), directory)
    reasons: list[str] = []
    over = threading.Event()

    def superseded(reason: str) -> None:
        reasons.append(reason)
        over.set()

    lease = Lease(fleet, claimed, Jobs(), superseded)
    lease.start()
    fleet.mark_lost(claimed.node)
    assert over.wait(20)
    lease.stop()
    assert len(reasons) == 1 and "given up" in reasons[0]


def test_without_the_store_jobs_run_on_and_only_those_that_ask_are_frozen(fleet: FleetStore, directory: Path) -> None:
    jobs = Jobs()
    claimed, _ = claim(fleet, record(), directory)
    records = Path(fleet.bucket.url.removeprefix("file://")) / "records"
    lease = Lease(fleet, claimed, jobs, lambda reason: pytest.fail(reason))
    lease.start()
    until(lambda: lease.record.beat > claimed.beat)
    away = records.with_name("away")
    records.rename(away)
    records.write_text("not a directory: every read and write fails")
    until(lambda: jobs.frozen == [True])
    records.unlink()
    away.rename(records)
    until(lambda: jobs.frozen == [True, False])
    lease.stop()


def test_a_directory_has_one_agent(directory: Path) -> None:
    lock = lock_directory(directory)
    with pytest.raises(ErgoError, match="Another node agent") as caught:
        lock_directory(directory)
    assert caught.value.code == "node.running"
    os.close(lock)
    os.close(lock_directory(directory))
