"""The scene of the issue on a real fleet, small: a premium job preempts a basic one, which is moved; bits equal."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from events.types import DecisionMade, JobPhaseChanged
from model.job_state import JobPhase
from tests.fleet.harness import digests, job_directory, require_whole

GPT = (
    "--steps",
    "900",
    "--d-model",
    "64",
    "--layers",
    "2",
    "--dropout",
    "0.1",
    "--sync-every",
    "1",
    "--log-every",
    "0",
)
CNN = ("--steps", "60", "--workers", "0", "--width", "8")


@pytest.mark.timeout(400)
def test_a_premium_job_preempts_and_a_basic_one_moves_on(fleet, tmp_path, untouched):
    basic = fleet.submit(
        job_directory(tmp_path / "basic", "char_gpt.py"),
        *("--tier", "basic", "--ranks", "2", "--name", "scene-gpt", "--checkpoint-every", "30"),
        *("char_gpt.py", *GPT, "--out", "results"),
    )
    fleet.until_step(basic, 20)
    premium = fleet.submit(
        job_directory(tmp_path / "premium", "digits_cnn.py"),
        *("--tier", "premium", "--ranks", "4", "--name", "scene-cnn"),
        *("digits_cnn.py", *CNN, "--out", "results"),
    )
    assert {device.node.name for device in fleet.until_phase(premium, JobPhase.RUNNING).placement} == {
        "node-1",
        "node-2",
    }
    assert fleet.show(basic).phase is JobPhase.SUSPENDED
    fleet.until_phase(premium, JobPhase.COMPLETED)

    fleet.until_phase(basic, JobPhase.RUNNING)
    fleet.until_step(basic, int(fleet.show(basic).step) + 20)
    here = fleet.node_of(basic).name
    fleet.ergo("migrate", basic, "--to", "node-2" if here == "node-1" else "node-1", "--wait")
    view = fleet.until_phase(basic, JobPhase.COMPLETED)
    assert (view.preemptions, view.moves, view.recoveries) == (1, 1, 0)
    assert {transition.down_ms is not None for transition in view.transitions if transition.phase == "running"} == {
        False,
        True,
    }

    for job, ranks, script, arguments in ((basic, 2, "char_gpt.py", GPT), (premium, 4, "digits_cnn.py", CNN)):
        fleet.ergo("download", job, "results", str(tmp_path / job))
        assert digests(tmp_path / job, ranks) == untouched(script, ranks, *arguments)
        fleet.until(lambda job=job: fleet.show(job).unpublished_events == 0, "all events are published")
        require_whole(fleet.events(job))
    decisions = [event.data for event in fleet.events(basic) if isinstance(event, DecisionMade)]
    assert [decision.action for decision in decisions if decision.action in ("place", "preempt", "migrate")] == [
        "place",
        "preempt",
        "place",
        "migrate",
    ]
    assert "scene-cnn" in next(decision.reason for decision in decisions if decision.action == "preempt")
    told = [event.data.after for event in fleet.events(basic) if isinstance(event, JobPhaseChanged)]
    assert told == [transition.phase for transition in view.transitions]


def test_a_job_is_started_by_temporals_own_command_line(fleet):
    temporal = Path(subprocess.sys.executable).with_name("temporal")
    address = fleet.settings.temporal_config()["target_host"]
    spec = {"apiVersion": "ergosphere/v1", "argv": ["python", "-c", "print('hello from', __name__)"]}
    for job, payload in (("by-temporal", spec), ("by-temporal-wrong", {**spec, "tier": "gold", "ranks": 0})):
        subprocess.run(
            [
                *(temporal, "workflow", "start", "--address", address, "--type", "Job"),
                *("--task-queue", "ergo-jobs", "--workflow-id", job, "--input", json.dumps(payload)),
            ],
            check=True,
            capture_output=True,
        )
    assert fleet.until_phase("by-temporal", JobPhase.COMPLETED).exit_code == 0
    fleet.until(lambda: "hello from __main__" in fleet.ergo("logs", "by-temporal"), "its log is kept")
    shown = subprocess.run(
        [temporal, "workflow", "show", "--address", address, "--workflow-id", "by-temporal-wrong", "--output", "json"],
        check=True,
        capture_output=True,
        text=True,
    )
    failure = json.loads(shown.stdout)["events"][-1]["workflowExecutionFailedEventAttributes"]["failure"]["message"]
    assert "tier" in failure and "ranks" in failure
