"""What nobody needs goes; what somebody needs, or may be about to need, stays."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from model.control import AdvanceHeadInput, AllocateEpochInput, OpenJobInput
from model.ids import CheckpointId, Epoch, JobId, NodeId, Step, TenantId
from proxy_runtime.checkpoint import Part, Store
from proxy_runtime.storage import FleetStore, documents
from proxy_runtime.storage.checkpoints import assemble, pull, push
from proxy_runtime.storage.garbage import MIN_AGE_S, Removed, retain, sweep
from proxy_runtime.storage.sources import BucketSource
from proxy_runtime.storage.volumes import materialize, upload_directory
from tests.proxy_runtime.storage.builders import make_header, noise, write_parts

JOB = JobId("job")


def age(tmp_path: Path) -> None:
    """Makes all that is in the bucket and in stores old."""
    old = time.time() - MIN_AGE_S - 60
    for path in tmp_path.rglob("*"):
        if path.is_file():
            os.utime(path, (old, old))


@pytest.fixture
def job(fleet: FleetStore) -> Callable[[Store, bytes], CheckpointId]:
    """Commits checkpoints of a job, each from the content of its rank."""
    fleet.open_job(OpenJobInput(JOB, TenantId("acme"), "run", "run"))
    epoch = fleet.allocate_epoch(AllocateEpochInput(JOB, "run")).epoch
    fleet.advance_head(AdvanceHeadInput(JOB, "run", epoch, (NodeId("a", 1),)))
    parents: list[CheckpointId] = []

    def commit(store: Store, content: bytes) -> CheckpointId:
        part, written = write_parts(store, "a", {0: content})
        push(fleet, store, part, written.packs)
        header = make_header(1, len(parents)).model_copy(update={"parent": parents[-1] if parents else None})
        parents.append(assemble(fleet, store, JOB, epoch, header, [part]).root)
        fleet.commit_checkpoint(JOB, epoch, parents[-1], Step(len(parents)))
        return parents[-1]

    return commit


def test_the_newest_checkpoints_stay_and_so_do_the_old_packs_that_they_share(
    fleet: FleetStore, node_store: Callable[[str], Store], job: Callable[[Store, bytes], CheckpointId], tmp_path: Path
) -> None:
    store, shared = node_store("a"), noise(400_000)
    first, second, third = [job(store, noise(1_000_000) + shared) for _ in range(3)]
    assert retain(fleet, JOB, 1, store=store) == Removed(), "all is young"
    assert sweep(fleet, "acme") == Removed()
    age(tmp_path)
    assert retain(fleet, JOB, 2, store=store).checkpoints == 1
    assert sweep(fleet, "acme").packs == 0, "who has begun to pull the dropped one may finish"
    age(tmp_path)
    assert sweep(fleet, "acme") == Removed(), "its pack holds what the others share"
    for kept in (second, third):
        assert pull(fleet, node_store("b"), kept, [BucketSource(fleet.bucket)]).packs >= 0
        assert len(store.read(kept, JOB).read_file(Part.device(0), "storages")) == 1_400_000
    assert documents.read(fleet.bucket, documents.manifest_key("acme", first), documents.CheckpointDocument) is None


def test_packs_of_dropped_checkpoints_go_when_their_time_is_over(
    fleet: FleetStore, node_store: Callable[[str], Store], job: Callable[[Store, bytes], CheckpointId], tmp_path: Path
) -> None:
    store = node_store("a")
    newest = [job(store, noise(1_000_000)) for _ in range(3)][-1]
    (tmp_path / "project").mkdir()
    uploaded = upload_directory(fleet, "acme", tmp_path / "project")
    age(tmp_path)
    retain(fleet, JOB, 1, store=store)
    assert len(list((tmp_path / "a/tenants/acme/packs").iterdir())) == 1
    assert sweep(fleet, "acme").packs == 0
    age(tmp_path)
    removed = sweep(fleet, "acme")
    assert removed.packs == 2 and removed.bytes > 2_000_000
    assert pull(fleet, node_store("b"), newest, [BucketSource(fleet.bucket)]).packs == 1
    materialize(fleet, "acme", uploaded, tmp_path / "out")
    assert fleet.bucket.get(documents.condemned_key("acme")) is None


def test_a_checkpoint_that_was_never_committed_is_garbage(
    fleet: FleetStore, node_store: Callable[[str], Store], tmp_path: Path
) -> None:
    part, written = write_parts(node_store("a"), "a", {0: noise(500_000)})
    push(fleet, node_store("a"), part, written.packs)
    assemble(fleet, node_store("a"), JOB, Epoch(1), make_header(), [part])
    assert sweep(fleet, "acme") == Removed()
    age(tmp_path)
    assert sweep(fleet, "acme").checkpoints == 1
    age(tmp_path)
    assert sweep(fleet, "acme").packs == 1
    assert fleet.bucket.list("tenants/acme/packs") == []


def test_who_needs_a_condemned_pack_waits_and_brings_it_again(
    fleet: FleetStore, node_store: Callable[[str], Store]
) -> None:
    part, written = write_parts(node_store("a"), "a", {0: noise(500_000)})
    push(fleet, node_store("a"), part, written.packs)
    keys = tuple(documents.pack_key("acme", pack) for pack in written.packs)
    documents.write(fleet.bucket, documents.condemned_key("acme"), documents.Condemned(keys=keys))
    pushed: list[int] = []
    pusher = threading.Thread(
        target=lambda: pushed.append(push(fleet, node_store("a"), part, written.packs).packs), daemon=True
    )
    pusher.start()
    pusher.join(0.3)
    assert pusher.is_alive()
    fleet.bucket.delete(keys[0])
    fleet.bucket.delete(documents.condemned_key("acme"))
    pusher.join(30)
    assert pushed == [1]
