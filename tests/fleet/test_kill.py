"""Each process of the fleet is killed while a job runs: its bits are right, no event is lost, no epoch doubled."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from model.job_state import JobPhase
from tests.fleet.harness import ERGO, ROOT, require_right, submit_gpt

pytestmark = pytest.mark.slow

RANKS = 2
GPT = ("--steps", "1500", "--d-model", "64", "--layers", "2", "--sync-every", "1", "--log-every", "0")
SUBMIT = ("--tier", "basic", "--ranks", str(RANKS), "--checkpoint-every", "5")


def submit(fleet, tmp_path, name):
    return submit_gpt(fleet, tmp_path, name, SUBMIT, GPT)


@pytest.mark.parametrize(
    "module", ["infra.cluster_worker", "infra.job_worker", "kafka.Kafka", "start-dev", "infra.node_agent"]
)
def test_a_part_of_the_fleet_is_killed(fleet, tmp_path, untouched, module):
    job = submit(fleet, tmp_path, "killed-part")
    fleet.until_step(job, 50)
    fleet.kill(module)
    at = fleet.step(job)
    fleet.until_step(job, at + 50)
    fleet.ergo("preempt", job, "--wait")
    fleet.ergo("resume", job)
    view = require_right(fleet, job, tmp_path, untouched, RANKS, GPT)
    assert view.recoveries == 0, "the job itself was not to notice"


def test_a_node_whose_processes_are_all_killed_and_stays_away(fleet, tmp_path, untouched):
    # A third node, not supervised: nobody starts its agent again.
    directory = tmp_path / "node-3"
    agent = subprocess.Popen(
        [sys.executable, "-m", "infra.node_agent", "--name", "node-3", "--dir", str(directory), "--devices", "2"],
        env=fleet.env,
        cwd=ROOT,
    )
    try:
        fleet.until(lambda: fleet.store.node("node-3"), "node-3 has registered")
        job = submit(fleet, tmp_path, "lost-node")
        fleet.until_step(job, 20)
        if fleet.node_of(job).name != "node-3":
            fleet.ergo("migrate", job, "--to", "node-3", "--wait")
        fleet.until(lambda: fleet.show(job).checkpoints, "a checkpoint is committed")
        agent.kill()
        for process in fleet.processes(str(directory)):
            process.kill()
        view = require_right(fleet, job, tmp_path, untouched, RANKS, GPT)
        assert view.recoveries == 1
        assert all(device.node.name != "node-3" for device in view.transitions[-2].devices)
    finally:
        agent.kill()
        agent.wait()


def test_all_processes_of_a_job_on_a_node_are_killed(fleet, tmp_path, untouched):
    job = submit(fleet, tmp_path, "lost-part")
    fleet.until(lambda: fleet.show(job).checkpoints, "a checkpoint is committed")
    for process in fleet.processes("proxy_runtime.shim"):
        process.kill()
    assert require_right(fleet, job, tmp_path, untouched, RANKS, GPT).recoveries == 1


def test_every_workflow_continues_as_new_under_a_running_job(fleet, tmp_path, untouched):
    job = submit(fleet, tmp_path, "renewed")
    fleet.until_step(job, 50)
    client = fleet.client()
    runs = {}
    for workflow in (job, "cluster/local"):
        handle = client.get_workflow_handle(workflow)
        runs[workflow] = fleet.wait(handle.describe()).run_id
        fleet.wait(handle.signal("renew"))
    for workflow, run in runs.items():
        fleet.until(
            lambda workflow=workflow, run=run: (
                fleet.wait(client.get_workflow_handle(workflow).describe()).run_id != run
            ),
            f"{workflow} has continued as new",
        )
    at = fleet.step(job)
    fleet.until_step(job, at + 20)
    fleet.ergo("preempt", job, "--wait")
    fleet.ergo("resume", job)
    view = require_right(fleet, job, tmp_path, untouched, RANKS, GPT)
    assert (view.recoveries, view.preemptions) == (0, 1)


LONG_STEPS = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    time.sleep(20)
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    print("step", step, flush=True)
with open(f"ended-{rank}", "w") as file:
    file.write(repr(model.module.weight.sum().item()))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["checkpoint", "preempt"])
def test_a_rank_that_is_killed_while_a_cut_waits_for_the_end_of_a_step(fleet, tmp_path, how):
    (tmp_path / "long_steps.py").write_text(LONG_STEPS)
    job = fleet.submit(tmp_path, "--ranks", "2", "--checkpoint-every", "3600", "long_steps.py")
    fleet.until_step(job, 1)
    asked = subprocess.Popen(
        [*ERGO, how, job, "--wait"], env=fleet.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    time.sleep(5)
    assert asked.poll() is None, "it waits for the end of the step"
    below = [one for shim in fleet.processes("proxy_runtime.shim") for one in shim.children(recursive=True)]
    commands = [one for one in below if one.cmdline()[1:] == ["long_steps.py"]]
    (rank,) = [one for one in commands if one.environ().get("RANK") == "1"]
    rank.kill()
    said, _ = asked.communicate(timeout=60)
    assert asked.returncode != 0, said
    assert "killed by SIGKILL" in said or "lost a process" in said
    view = fleet.until_phase(job, JobPhase.COMPLETED, JobPhase.FAILED)
    assert (view.phase, view.recoveries, view.preemptions) == (JobPhase.COMPLETED, 1, 0)
    assert [one.kind for one in view.checkpoints] == ["final"], "none was made of what was left"
    for rank in range(2):
        fleet.ergo("download", job, f"ended-{rank}", str(tmp_path / f"ended-{rank}"))
        assert float((tmp_path / f"ended-{rank}").read_text()) != 0.0
