"""A node's chunk store does not grow for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from model.control import AdvanceHeadInput, AllocateEpochInput, OpenJobInput
from model.ids import JobId, NodeId, Step, TenantId
from model.runtime import TransferInput
from proxy_runtime.checkpoint.exchange import SETTLED_S
from proxy_runtime.node.storage import Storage
from proxy_runtime.storage import Bucket, FleetStore
from proxy_runtime.storage.checkpoints import assemble, push
from proxy_runtime.storage.errors import StorageError
from proxy_runtime.storage.garbage import RETAIN_AGE_S
from tests.proxy_runtime.storage.builders import make_header, noise, write_parts

JOB, TENANT = JobId("job"), TenantId("acme")


@pytest.fixture
def written(tmp_path: Path) -> Storage:
    """Of a node with two checkpoints of a job."""
    fleet = FleetStore(Bucket.open(f"file://{tmp_path}/bucket"), bytes(32))
    fleet.open_job(OpenJobInput(JOB, TENANT, "run", "run"))
    epoch = fleet.allocate_epoch(AllocateEpochInput(JOB, "run")).epoch
    fleet.advance_head(AdvanceHeadInput(JOB, "run", epoch, (NodeId("a", 1),)))
    storage = Storage(fleet, tmp_path / "store")
    store = storage.store(TENANT)
    for number in (1, 2):
        part, written = write_parts(store, "a", {0: noise(300_000)})
        push(fleet, store, part, written.packs)
        checkpoint = assemble(fleet, store, JOB, epoch, make_header(1, number), [part]).root
        fleet.commit_checkpoint(JOB, epoch, checkpoint, Step(number))

    return storage


@pytest.fixture
def packs(tmp_path: Path) -> Callable[[], int]:
    """How many the node has."""
    return lambda: len(list((tmp_path / "store").rglob("*.pack")))


def test_old_packs_that_no_job_of_the_node_needs_go(tmp_path: Path, written: Storage, packs: Callable[[], int]) -> None:
    storage = written
    assert packs() == 2
    storage.tidy([JOB])
    assert packs() == 2, "all is young"
    aged(tmp_path / "store", RETAIN_AGE_S + 5)
    storage.tidy([JOB], has_ended=lambda _job: True)
    assert packs() == 1, "the newest checkpoint of a job that is here stays"
    storage.tidy([])
    assert packs() == 0


def test_what_only_a_job_needs_that_has_ended_goes_within_a_minute(
    tmp_path: Path, written: Storage, packs: Callable[[], int]
) -> None:
    part, unpushed = write_parts(written.store(TENANT), "a", {0: noise(300_000)}, job="other")
    aged(tmp_path / "store", SETTLED_S + 5)
    written.tidy([])
    assert packs() == 3, "a job that has not ended may come back this moment"
    written.tidy([], has_ended=lambda job: job == JOB)
    assert packs() == 1, "what another job has written is not pushed yet"
    push(written.fleet, written.store(TENANT), part, unpushed.packs)
    aged(tmp_path / "store", RETAIN_AGE_S + 5)
    push(written.fleet, written.store(TENANT), part, unpushed.packs)
    assert written.tidy([]) == 0, "a push that is repeated finds what it needs"


def test_what_was_pulled_waits_for_the_other_nodes_of_its_job(
    tmp_path: Path, written: Storage, packs: Callable[[], int]
) -> None:
    head = written.fleet.head(JOB)
    assert head is not None and head.checkpoint is not None
    written.pull(TransferInput(JOB, head.epoch, head.checkpoint, ("store",), 60.0, tenant=TENANT))
    aged(tmp_path / "store", RETAIN_AGE_S + 5)
    written.tidy([])
    assert packs() == 1 and written.manifest(TENANT, JOB, head.checkpoint).root == head.checkpoint
    written.tidy([], has_ended=lambda _job: True)
    assert packs() == 0


def test_where_the_disk_is_nearly_full_no_checkpoint_is_begun(
    tmp_path: Path, written: Storage, packs: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [5 << 20, 50 << 20]
    monkeypatch.setattr("proxy_runtime.node.storage.free_bytes", lambda _path: free[0] if packs() else free[1])
    aged(tmp_path / "store", SETTLED_S + 5)
    written.make_room([JOB], 1 << 20)
    assert packs() == 2, "there is room"
    with pytest.raises(StorageError) as caught:
        written.make_room([JOB], 10 << 20)
    assert caught.value.code == "storage.full" and "ERGO_FREE_BYTES" in str(caught.value)
    assert packs() == 1, "all that can go went first"
    written.make_room([], 10 << 20)
    assert packs() == 0


def aged(where: Path, seconds: float) -> None:
    for path in where.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - seconds, time.time() - seconds))
