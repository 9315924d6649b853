"""The commands as typed, against a real Temporal server and jobs that say what a test wants them to say."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest

from activities.snapshots import Snapshots
from model.control import JobView
from model.ids import Epoch, JobId, Step
from model.names import Query
from model.records import JobOnNode
from scheduling.state import ClusterState, Finding
from tests.cli.conftest import DEADLINE_S
from tests.cli.samples import NODE_1, NODE_2, node, view


async def become(handle, **fields):
    shown = replace(view(handle.id), **fields)
    await handle.signal("become", shown)
    return shown


async def until(look, wanted):
    async with asyncio.timeout(DEADLINE_S):
        while (found := await look()) != wanted:
            await asyncio.sleep(0.05)
    return found


async def listed(client, count):
    """Visibility follows a moment later."""

    async def running():
        query = "WorkflowType = 'Job' AND ExecutionStatus = 'Running'"
        return len([found async for found in client.list_workflows(query)])

    await until(running, count)


async def test_ps(ergo, job, client):
    first, second = await job("char-gpt"), await job("digits", ranks=4)
    await become(first)
    await listed(client, 2)
    rows = json.loads((await ergo("ps", "--json")).out)
    assert [(row["id"], row["phase"], row["width"]) for row in rows] == [
        (first.id, "running", 2), (second.id, "queued", 0),
    ]  # fmt: skip
    assert rows[1]["waiting"] == "it needs 2 devices and 0 are free"
    assert {row["source"] for row in rows} == {"workflow"}
    done = await ergo("ps")
    assert done.out.count("\n") == 3
    assert "\x1b" not in done.out


async def test_ps_of_a_job_whose_workflow_was_reset(ergo, job, client):
    handle = await job("char-gpt")
    await become(handle)
    described = await handle.describe()

    async def first_task():
        """A query is answered before its task is written down."""
        events = (await handle.fetch_history()).events
        return next((e.event_id for e in events if e.HasField("workflow_task_completed_event_attributes")), None)

    async with asyncio.timeout(DEADLINE_S):
        while (finished := await first_task()) is None:
            await asyncio.sleep(0.05)
    request = ResetWorkflowExecutionRequest(
        namespace=client.namespace,
        workflow_execution=WorkflowExecution(workflow_id=handle.id, run_id=described.run_id),
        workflow_task_finish_event_id=finished,
        request_id="a-test",
        reason="a test",
    )
    await client.workflow_service.reset_workflow_execution(request)
    await listed(client, 1)

    async def runs():
        return len([found async for found in client.list_workflows(f"WorkflowId = '{handle.id}'")])

    await until(runs, 2)
    for options in ((), ("-a",)):
        rows = json.loads((await ergo("ps", "--json", *options)).out)
        assert [row["source"] for row in rows if row["id"] == handle.id] == ["workflow"]


async def test_ps_of_a_tenant(ergo, job, client):
    await job("char-gpt")
    await listed(client, 1)
    assert json.loads((await ergo("ps", "--json", "--tenant", "nobody")).out) == []
    assert "not the id of a tenant" in (await ergo("ps", "--tenant", "' OR ''='", code=2)).err


async def test_nothing_hangs_where_no_worker_answers(ergo, job, client, worker):
    handle = await job("silent")
    await handle.query(Query.SHOW, result_type=JobView)
    await listed(client, 1)
    await worker.shutdown()
    async with asyncio.timeout(DEADLINE_S):  # each waits for seconds: at once
        done, as_json, show = await asyncio.gather(ergo("ps"), ergo("ps", "--json"), ergo("show", handle.id, code=1))
    assert handle.id in done.out
    assert "queued ?" in done.out
    assert "no worker has answered for 1 of the jobs" in done.err
    (row,) = json.loads(as_json.out)
    assert row["source"] == "visibility"
    assert "No worker answers" in show.err
    assert "`ergo up`" in show.err


async def test_steps_are_those_of_the_nodes(ergo, job, client, store):
    handle = await job("char-gpt")
    await become(handle)
    store.claim_node(node(NODE_1, JobOnNode(job=JobId(handle.id), epoch=Epoch(2), step=Step(777))))
    await listed(client, 1)
    (row,) = json.loads((await ergo("ps", "--json")).out)
    assert row["step"] == 777
    assert json.loads((await ergo("show", handle.id, "--json")).out)["step"] == 777


async def test_show(ergo, job):
    handle = await job("char-gpt")
    await become(handle)
    fields = json.loads((await ergo("show", handle.id, "--json")).out)
    for name in ("id", "phase", "step", "epoch", "placement", "width", "tier", "gpu_fraction", "checkpoints"):
        assert name in fields
    text = (await ergo("show", handle.id)).out
    for part in (
        "Time line",
        "Decisions",
        "Checkpoints",
        "81.5%",
        "restored (waiting 60.00 s",
        "preempted for digits-4",
    ):
        assert part in text


async def test_explain_says_where_a_node_says_something_else(ergo, job, store):
    handle = await job("char-gpt")
    text = "it says that it runs there, and node-1 has no part of it in epoch 2"
    finding = Finding("missing", handle.id, NODE_1, text, datetime(2026, 11, 29, 12, tzinfo=UTC), counts=True)
    others = replace(finding, job="other"), replace(finding, kind="leftover", counts=False)
    Snapshots(store, "local").write(b"{}", ClusterState("local", findings=(finding, *others)))
    lines = (await ergo("explain", handle.id)).out.splitlines()
    assert lines[-1] == f"Since 2026-11-29 12:00:00 UTC nodes and the scheduler differ: {text}."
    fields = json.loads((await ergo("explain", handle.id, "--json")).out)
    (told,) = fields["contradictions"]
    assert (told["kind"], told["node"], told["text"]) == ("missing", "node-1", text)


async def test_explain(ergo, job):
    handle = await job("char-gpt")
    lines = (await ergo("explain", handle.id)).out.splitlines()
    assert lines == [
        f"Job {handle.id} (standard, 1 rank) is queued.",
        "It waits: it needs 2 devices and 0 are free",
        "Nothing has been decided about it yet.",
    ]
    await become(handle)
    lines = (await ergo("explain", handle.id)).out.splitlines()
    assert lines[0] == f"Job {handle.id} (basic, 2 ranks) is running on node-1: cpu-0 cpu-1, in epoch 2."
    assert lines[-1] == "2026-11-29 12:00:59 UTC  preempt: digits-4 of tier premium needs 4 devices"
    fields = json.loads((await ergo("explain", handle.id, "--json")).out)
    assert (fields["phase"], [one["action"] for one in fields["decisions"]]) == (
        "running",
        ["place", "preempt", "waits"],
    )


@pytest.mark.parametrize("command", ["show", "explain", "logs", "preempt", "resume", "checkpoint", "cancel"])
async def test_a_job_that_there_is_not(ergo, job, client, command):
    handle = await job("char-gpt")
    await listed(client, 1)
    wrong = handle.id.replace("gpt", "gtp")
    done = await ergo(command, wrong, code=1)
    assert done.err == f"ergo: There is no job {wrong}. Did you mean {handle.id}?\n"
    assert done.out == ""


async def test_what_is_not_a_job_is_none(ergo, client, worker):
    done = await ergo("show", "Not/An Id", code=1)
    assert "There is no job Not/An Id." in done.err


async def test_requests(ergo, job, store):
    store.claim_node(node(NODE_1))
    handle = await job("char-gpt")
    assert "preempted: for a test" in (await ergo("preempt", handle.id, "--wait", "--reason", "for a test")).err
    assert "moved to node-1" in (await ergo("migrate", handle.id, "--to", "node-1")).err
    refused = await ergo("resume", handle.id, code=1)
    assert refused.err == "ergo: Job is not held: there is nothing to resume.\n"
    failed = await ergo("checkpoint", handle.id, "--wait", code=1)
    assert failed.err == "ergo: The cut was called off: a rank holds a socket.\n"
    assert "cancelled" in (await ergo("cancel", handle.id)).err


async def test_requests_to_an_ended_job(ergo, job):
    handle = await job("char-gpt")
    await handle.signal("end")
    await handle.result()
    done = await ergo("preempt", handle.id, code=1)
    assert done.err == (
        f"ergo: Job {handle.id} has ended (completed): there is nothing to preempt. "
        f"`ergo show {handle.id}` tells how it ended.\n"
    )


async def test_migrate_to_a_node_that_there_is_not(ergo, job, store):
    store.claim_node(node(NODE_1))
    store.claim_node(node(NODE_2))
    handle = await job("char-gpt")
    done = await ergo("migrate", handle.id, "--to", "nod-1", code=1)
    assert done.err == "ergo: There is no node nod-1. Did you mean node-1? The nodes are node-1, node-2.\n"
    assert "Missing option '--to'" in (await ergo("migrate", handle.id, code=2)).err


async def test_no_fleet(plain_env, ergo):
    nowhere = {**plain_env}
    ergo.env = nowhere
    for command in (["ps"], ["show", "x"], ["fleet"], ["logs", "x"], ["cancel", "x"]):
        done = await ergo(*command, code=1)
        assert done.err == "ergo: no fleet is up: `ergo up`\n"


async def test_temporal_is_away(ergo):
    ergo.env["TEMPORAL_ADDRESS"] = "127.0.0.1:1"
    done = await ergo("ps", code=1)
    assert "Temporal at 127.0.0.1:1 does not answer" in done.err
    assert done.err.count("\n") == 1


async def test_fleet(ergo, job, client, store):
    store.claim_node(node(NODE_1))
    handle = await job("char-gpt")
    await become(handle)
    await listed(client, 1)
    done = await ergo("fleet")
    assert f"{handle.id} (rank 1)" in done.out
    assert "1 node; 2 devices of cpu: 2 in use, 0 free" in done.err
    assert "the scheduler does not answer" in done.err
    fields = json.loads((await ergo("fleet", "--json")).out)
    assert fields["scheduler"] is None
    (only,) = fields["nodes"]
    assert only["devices"][1]["jobs"] == [{"id": handle.id, "ranks": [1]}]
    assert only["state"] == "alive"


async def test_watching_ends_with_ctrl_c(ergo, job, client):
    await job("char-gpt")
    await listed(client, 1)
    process = await ergo.start("ps", "-w", "--json")
    async with asyncio.timeout(DEADLINE_S):
        lines = [await process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert all(len(json.loads(line)) == 1 for line in lines)
    assert process.returncode == 130
    assert err == b""


async def test_a_request_is_waited_for_until_ctrl_c(ergo, job, store):
    handle = await job("char-gpt")
    process = await ergo.start("preempt", handle.id, "--wait", "--reason", "for as long as it takes")
    async with asyncio.timeout(DEADLINE_S):
        while not any([event.HasField("workflow_execution_update_accepted_event_attributes")
                       async for event in handle.fetch_history_events()]):  # fmt: skip
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert process.returncode == 130
    assert err == b""


async def test_a_request_that_nobody_takes_is_given_up_with_ctrl_c(ergo, job, worker, tmp_path):
    handle = await job("silent")
    await handle.query(Query.SHOW, result_type=JobView)
    await worker.shutdown()
    log = tmp_path / "fleet" / "logs" / "cli.log"
    log.parent.mkdir(parents=True)
    process = await ergo.start("preempt", handle.id)
    async with asyncio.timeout(DEADLINE_S):
        while not log.is_file() or "asks" not in log.read_text():
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)  # the call is under way
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert process.returncode == 130
    assert err == b""


@pytest.mark.parametrize("arguments", [["ps", "--nonsense"], ["show"], ["migrate", "x"], ["ps", "-n", "0"]])
async def test_wrong_usage(ergo, arguments):
    await ergo(*arguments, code=2)
