"""Any client of the workflow engine: a job is started and led with nothing but Temporal's own command line."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import Client

from infra.temporal import binary
from model.job_state import JobPhase
from model.runtime import Outcome
from tests.workflows.job.fleet import Fleet, Handle, until


async def _temporal(client: Client, *words: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        str(binary()),
        *words,
        *("--address", client.service_client.config.target_host, "--output", "json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return json.loads(out) if out.strip() else None


async def test_plain_json_from_the_command_line(fleet: Fleet) -> None:
    spec = {"apiVersion": "ergosphere/v1", "argv": ["python", "train.py"], "ranks": 1, "tier": "basic"}
    name = ("--workflow-id", "from-the-cli")
    await _temporal(
        fleet.client,
        "workflow",
        "start",
        "--type",
        "Job",
        "--task-queue",
        "ergo-jobs",
        *name,
        "--input",
        json.dumps(spec),
    )
    job = Handle(fleet, fleet.client.get_workflow_handle("from-the-cli"))
    await job.run_on(fleet.nodes[0].device(0))
    asked = await _temporal(
        fleet.client, "workflow", "update", "execute", *name, "--name", "preempt", "--input", '{"wait": true}'
    )
    assert "suspended" in json.dumps(asked)
    shown = await _temporal(fleet.client, "workflow", "query", *name, "--type", "show")
    view = shown["queryResult"][0] if "queryResult" in shown else shown
    assert view["phase"] == "suspended" and view["tier"] == "basic" and not view["placement"]
    await _temporal(fleet.client, "workflow", "update", "execute", *name, "--name", "resume")
    await job.run_on(fleet.nodes[1].device(0))
    await job.end(Outcome.COMPLETED)
    await job.phase(JobPhase.COMPLETED)
    await until(lambda: bool(job.check()), "its events")


async def test_the_page_in_the_ui_tells_the_story(fleet: Fleet) -> None:
    job = await fleet.submit(ranks=2)
    node = fleet.nodes[0]
    await job.run_on(node.device(0), node.device(1))
    meta = await job.workflow.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)
    page = meta.current_details
    assert "| phase | **running** |" in page and "node-0@1/cpu-0" in page and "The test wants it to place." in page
    history = await job.workflow.fetch_history()
    told = [event.user_metadata.summary.data.decode() for event in history.events if event.HasField("user_metadata")]
    assert '"epoch 1: 2 ranks on node-0"' in told
    await job.workflow.cancel()
