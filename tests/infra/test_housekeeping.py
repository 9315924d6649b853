"""The fleet's store is swept while the cluster worker runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from infra.housekeeping import EndedJobs, keep_house
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


class Workflows:
    """As much of a Temporal client as is asked which workflows have closed."""

    def __init__(self, **statuses: WorkflowExecutionStatus | None) -> None:
        self.statuses = statuses
        self.asked: list[str] = []
        self.down = False

    async def list_workflows(self, _query: str) -> AsyncIterator[Any]:
        if self.down:
            raise RPCError("away", RPCStatusCode.UNAVAILABLE, b"")
        for name, status in self.statuses.items():
            if status is WorkflowExecutionStatus.RUNNING:
                yield SimpleNamespace(id=name)

    def get_workflow_handle(self, name: str) -> Any:
        async def describe() -> Any:
            self.asked.append(name)
            status = self.statuses.get(name)
            if status is None:
                raise RPCError("workflow not found", RPCStatusCode.NOT_FOUND, b"")
            info = SimpleNamespace(workflow_execution_info=SimpleNamespace(first_run_id="run"))
            return SimpleNamespace(raw_description=info, status=status)

        return SimpleNamespace(describe=describe)


async def test_a_job_has_ended_when_its_workflow_is_found_closed_twice(tmp_path: Path) -> None:
    fleet = FleetStore(Bucket.open(f"file://{tmp_path}/bucket"), bytes(32))
    for name in ("done", "runs", "forgotten"):
        fleet.open_job(OpenJobInput(JobId(name), TENANT, "run", "run"))
    status = WorkflowExecutionStatus
    workflows = Workflows(done=status.COMPLETED, runs=status.RUNNING)
    jobs = EndedJobs(cast("Any", workflows), fleet)
    assert await jobs.find() == [], "its nodes may not have heard of it"
    workflows.down = True
    assert [head.job for head in await jobs.find()] == ["done"], "an outage makes nothing alive"
    workflows.down = False
    assert [head.job for head in await jobs.find()] == ["done"]
    assert workflows.asked.count("done") == 1 and "runs" not in workflows.asked
    workflows.statuses["done"] = status.RUNNING  # reset
    assert await jobs.find() == []
    workflows.statuses["done"] = status.FAILED
    assert await jobs.find() == []
    fleet.open_job(OpenJobInput(JobId("done"), TENANT, "run", "second"))
    assert await jobs.find() == [], "another run has opened it since"
