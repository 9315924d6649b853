"""The fleet's store is swept while the cluster worker runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from infra.housekeeping import keep_house
from model.control import AdvanceHeadInput, AllocateEpochInput, OpenJobInput
from model.ids import JobId, NodeId, TenantId
from proxy_runtime.storage import Bucket, FleetStore
from proxy_runtime.storage.checkpoints import assemble, push
from proxy_runtime.storage.errors import StorageError
from tests.proxy_runtime.storage.builders import make_header, noise, write_parts

JOB, TENANT = JobId("job"), TenantId("acme")


async def test_packs_of_a_checkpoint_that_was_never_committed_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = FleetStore(Bucket.open(f"file://{tmp_path}/bucket"), bytes(32))
    fleet.open_job(OpenJobInput(JOB, TENANT, "run", "run"))
    epoch = fleet.allocate_epoch(AllocateEpochInput(JOB, "run")).epoch
    fleet.advance_head(AdvanceHeadInput(JOB, "run", epoch, (NodeId("a", 1),)))
    store = fleet.node_store(tmp_path / "store", TENANT)
    part, written = write_parts(store, "a", {0: noise(300_000)})
    push(fleet, store, part, written.packs)
    assemble(fleet, store, JOB, epoch, make_header(1, 1), [part])
    assert fleet.bucket.list("tenants/acme/packs")

    failures = [StorageError("The store is away.", code="storage.unreachable")]
    read_all = fleet.heads.read_all

    def sometimes() -> object:
        if failures:
            raise failures.pop()
        return read_all()

    monkeypatch.setattr(fleet.heads, "read_all", sometimes)
    keeping = asyncio.create_task(keep_house(fleet, every_s=0.05, min_age_s=-3600.0))
    try:
        async with asyncio.timeout(20):
            while fleet.bucket.list("tenants/acme/packs"):
                await asyncio.sleep(0.02)
    finally:
        keeping.cancel()
    assert not failures, "an outage does not end it"
