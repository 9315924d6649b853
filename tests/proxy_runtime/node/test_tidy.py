"""A node's chunk store does not grow for ever."""

from __future__ import annotations

import os
import time
from pathlib import Path

from model.control import AdvanceHeadInput, AllocateEpochInput, OpenJobInput
from model.ids import JobId, NodeId, Step, TenantId
from proxy_runtime.node.storage import Storage
from proxy_runtime.storage import Bucket, FleetStore
from proxy_runtime.storage.checkpoints import assemble, push
from tests.proxy_runtime.storage.builders import make_header, noise, write_parts

JOB, TENANT = JobId("job"), TenantId("acme")


def test_old_packs_that_no_job_of_the_node_needs_go(tmp_path: Path) -> None:
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

    def packs() -> int:
        return len(list((tmp_path / "store").rglob("*.pack")))

    assert packs() == 2
    storage.tidy([JOB])
    assert packs() == 2, "all is young"
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - 7200,) * 2)
    storage.tidy([JOB])
    assert packs() == 1, "the newest checkpoint of a job that is here stays"
    storage.tidy([])
    assert packs() == 0
