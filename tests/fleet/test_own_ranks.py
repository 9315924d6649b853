"""Scripts that start their own ranks, on a real fleet: stopped, moved, lost, and right to the bit."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from model.control import JobView
from model.job_state import JobPhase
from tests.end_to_end.harness import JOBS, Script
from tests.end_to_end.harness import run as run_alone
from tests.fleet.harness import ROOT, LocalFleet, job_directory, require_right, submit_gpt
from tests.fleet.torture import SHORT, Torture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TREE = ("--pack", "node", "--devices", "2")
SPAWN = ("spawns.py", "--steps", "6000")
GPT = ("--steps", "700", "--d-model", "64", "--layers", "2", "--sync-every", "1", "--log-every", "0")
LONG = ("--steps", "1200", *GPT[2:])


def results(text: str) -> dict[str, str]:
    return {rank: digest for digest, rank in re.findall(r"^RESULT ([0-9a-f]{64}) rank (\d+)$", text, re.MULTILINE)}


def told(view: JobView) -> str:
    return "\n".join(f"{change.time:%H:%M:%S} {change.phase}: {change.reason}" for change in view.transitions)


def submit_torchrun(fleet: LocalFleet, tmp_path: Path, name: str, script: Sequence[str] = GPT) -> str:
    options = ("--tier", "basic", *TREE, "--checkpoint-every", "5", "--name", name)
    directory = job_directory(tmp_path / name, "char_gpt.py")
    command = ("torchrun", "--nproc-per-node", "2", "char_gpt.py", *script, "--out", "results")
    return fleet.submit(directory, *options, *command)


def test_spawned_ranks_are_stopped_and_moved_as_one(fleet: LocalFleet, tmp_path: Path) -> None:
    directory = tmp_path / "spawns"
    directory.mkdir()
    for name in ("spawns.py", "_job.py"):
        shutil.copy(JOBS / name, directory)
    alone = run_alone(Script(JOBS / "spawns.py", SPAWN[1:], ranks=2, launcher=("python",)), tmp_path / "alone")
    expected = results(alone.logs[0])
    assert set(expected) == {"0", "1"}, alone.logs[0][-2000:]

    job = fleet.submit(directory, "--tier", "basic", *TREE, "--checkpoint-every", "0", *SPAWN)
    fleet.until_step(job, 20)
    assert re.search(rf"{job}\s+basic\s+running\s+own on 2 ", fleet.ergo("ps"))
    fleet.ergo("preempt", job, "--wait")
    view = fleet.show(job)
    assert (view.phase, view.placement) == (JobPhase.SUSPENDED, ())
    assert view.checkpoints[-1].step >= 20
    fleet.ergo("resume", job, "--wait")
    fleet.until_step(job, int(view.checkpoints[-1].step) + 20)

    source = fleet.node_of(job).name
    target = "node-2" if source == "node-1" else "node-1"
    fleet.ergo("migrate", job, "--to", target, "--wait")
    view = fleet.show(job)
    assert {device.node.name for device in view.placement} == {target} and view.width == 2
    fleet.ergo("checkpoint", job, "--wait")
    assert fleet.show(job).checkpoints[-1].kind == "live"

    view = fleet.until_phase(job, JobPhase.COMPLETED)
    assert (view.preemptions, view.moves, view.recoveries) == (1, 1, 0)
    assert results(fleet.ergo("logs", job)) == expected


def test_torchrun_goes_on_after_a_preemption_and_a_killed_shim(
    fleet: LocalFleet, tmp_path: Path, untouched: Callable[..., dict[str, str]]
) -> None:
    torture = Torture(fleet, tmp_path / "work", untouched)
    job = submit_torchrun(fleet, tmp_path, "torchrun")
    fleet.until_step(job, 20)
    other = submit_gpt(fleet, tmp_path, "premium", ("--tier", "premium", "--ranks", "4"), SHORT)
    fleet.until_phase(other, JobPhase.COMPLETED)
    fleet.until(lambda: fleet.show(job).preemptions == 1, "the scheduler has preempted it")
    fleet.until_phase(job, JobPhase.RUNNING)
    fleet.until_step(job, int(fleet.show(job).checkpoints[-1].step) + 20)
    torture.of_job(job, "shim")[0].kill()
    view = require_right(fleet, job, tmp_path, untouched, 2, GPT)
    assert (view.preemptions, view.recoveries) == (1, 1), told(view)
    torture.require_clean(job)


def test_torchrun_goes_on_elsewhere_when_its_node_is_lost(
    fleet: LocalFleet, tmp_path: Path, untouched: Callable[..., dict[str, str]]
) -> None:
    directory = tmp_path / "node-3"  # not supervised: nobody starts its agent again
    agent = subprocess.Popen(
        [sys.executable, "-m", "infra.node_agent", "--name", "node-3", "--dir", str(directory), "--devices", "2"],
        env=fleet.env,
        cwd=ROOT,
    )
    try:
        fleet.until(lambda: fleet.store and fleet.store.node("node-3"), "node-3 has registered")
        job = submit_torchrun(fleet, tmp_path, "lost-tree")
        fleet.until_step(job, 20)
        if fleet.node_of(job).name != "node-3":
            fleet.ergo("migrate", job, "--to", "node-3", "--wait")
        count = len(fleet.show(job).checkpoints)
        fleet.until(lambda: len(fleet.show(job).checkpoints) > count, "a checkpoint is committed there")
        agent.kill()
        for process in fleet.processes(str(directory)):
            process.kill()
        view = require_right(fleet, job, tmp_path, untouched, 2, GPT)
        assert view.recoveries == 1, told(view)
        assert all(device.node.name != "node-3" for device in view.transitions[-2].devices)
    finally:
        agent.kill()


def workers(torture: Torture, job: str) -> list[psutil.Process]:
    """The processes that the job's launcher has started."""
    found = torture.of_job(job, "rank")
    parents = {process.ppid() for process in found}
    return [process for process in found if process.pid not in parents]


@pytest.mark.timeout(1800)
def test_torchrun_goes_on_after_killed_ranks_and_a_killed_proxy_and_from_a_drained_node(
    fleet: LocalFleet, tmp_path: Path, untouched: Callable[..., dict[str, str]]
) -> None:
    """The launcher ends with 1 when one of its processes is killed, and nobody has asked for that."""
    torture = Torture(fleet, tmp_path / "work", untouched)
    job = submit_torchrun(fleet, tmp_path, "struck-tree", LONG)
    fleet.until_step(job, 20)
    fleet.ergo("checkpoint", job, "--wait")
    for time, kind in enumerate(("rank", "proxy", "rank"), 1):  # the tree that has been started, and restored ones
        victims = workers(torture, job) if kind == "rank" else torture.of_job(job, kind)
        assert len(victims) == 2, victims
        torture.end(victims[1:])
        fleet.until(lambda time=time: fleet.show(job).recoveries == time, f"it is recovered after a killed {kind}")
        fleet.until_step(job, int(fleet.show(job).checkpoints[-1].step) + 20)
    told_of = "".join(path.read_text() for path in fleet.directory.glob("nodes/*/parts.log"))
    assert len(re.findall(r"after process \d+ of its tree was killed by SIGKILL", told_of)) == 2

    drained = fleet.node_of(job).name
    fleet.ergo("node", "drain", drained, "--wait")
    try:
        view = require_right(fleet, job, tmp_path, untouched, 2, LONG)
        assert {device.node.name for device in view.transitions[-2].devices}.isdisjoint({drained}), told(view)
        assert (view.preemptions, view.moves, view.recoveries) == (0, 1, 3), told(view)
        torture.require_clean(job)
    finally:
        fleet.ergo("node", "uncordon", drained)


def test_a_rank_that_fails_by_itself_is_the_scripts_own_failure(fleet: LocalFleet, tmp_path: Path) -> None:
    """Its launcher ends the others with signals, and exits with the same code as above."""
    directory = tmp_path / "fails"
    directory.mkdir()
    (directory / "fails.py").write_text(
        "import os, time, torch\n"
        "torch.ones(1, device=f'cuda:{os.environ[\"RANK\"]}').item()\n"
        "assert os.environ['RANK'] == '0', 'a fault of its own'\n"
        "time.sleep(600)\n"
    )
    job = fleet.submit(directory, "--tier", "basic", *TREE, "torchrun", "--nproc-per-node", "2", "fails.py")
    view = fleet.until_phase(job, JobPhase.FAILED)
    assert view.recoveries == 0 and "a fault of its own" in fleet.ergo("logs", job), told(view)


def test_more_devices_than_any_node_has(fleet: LocalFleet, tmp_path: Path) -> None:
    directory = tmp_path / "wide"
    directory.mkdir()
    (directory / "wide.py").write_text("")
    job = fleet.submit(directory, "--pack", "node", "--devices", "3", "wide.py")
    fleet.until(lambda: "on one node for each process tree" in fleet.show(job).waiting, "it is told why it waits")
    assert "no node has more than 2" in fleet.ergo("explain", job)
    fleet.ergo("cancel", job, "--wait")
