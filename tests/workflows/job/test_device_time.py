"""Device time counts until the job leaves `running`, also where it holds no device any more by then."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from temporalio import workflow

from model.control import CheckpointView
from model.ids import CheckpointId, DeviceId, Epoch, JobId, Step
from model.job_spec import JobSpec
from model.job_state import JobPhase
from model.placement import Placement
from workflows.job.core import Job
from workflows.job.state import JobState

START = datetime(2026, 1, 1, tzinfo=UTC)
PLACEMENT = Placement(Epoch(1), (DeviceId.parse("node-1@1/cpu-0"), DeviceId.parse("node-1@1/cpu-1")), (0, 1))


def running_job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job of two ranks that runs since now, outside of a workflow."""
    monkeypatch.setattr(Job, "_emit_phase", lambda *_: None)
    monkeypatch.setattr(Job, "show", lambda _: None)
    monkeypatch.setattr(workflow.logger, "isEnabledFor", lambda _: False)
    state = JobState(job=JobId("job"), first_run="run", submitted_at=START, phase=JobPhase.STARTING)
    job = Job(JobSpec(apiVersion="ergosphere/v1", argv=("true",), ranks=2), state, lambda _: "")
    state.placement = PLACEMENT
    job.transition(JobPhase.RUNNING, "")
    return job


@pytest.mark.parametrize("after", [JobPhase.COMPLETED, JobPhase.QUEUED, JobPhase.SUSPENDING])
def test_device_time_of_an_epoch_is_kept(monkeypatch: pytest.MonkeyPatch, after: JobPhase) -> None:
    now = START
    monkeypatch.setattr(workflow, "now", lambda: now)
    job = running_job(monkeypatch)
    state = job.state
    now = START + timedelta(seconds=3)
    assert job.delivered_ms() == 6000
    if after is not JobPhase.SUSPENDING:
        state.placement = None
    job.transition(after, "")
    now += timedelta(seconds=3)
    assert job.delivered_ms() == 6000


@pytest.mark.parametrize(("checkpoint_after_s", "delivered_ms"), [(None, 0), (30, 60_000)])
def test_what_nobody_knows_to_have_run_is_not_delivered(
    monkeypatch: pytest.MonkeyPatch, checkpoint_after_s: int | None, delivered_ms: int
) -> None:
    now = START
    monkeypatch.setattr(workflow, "now", lambda: now)
    job = running_job(monkeypatch)
    state = job.state
    if checkpoint_after_s is not None:
        taken = START + timedelta(seconds=checkpoint_after_s)
        state.checkpoints.append(CheckpointView(CheckpointId("ck-" + "0" * 40), "live", taken, Step(1), 0, 0, 0.0))
    now = START + timedelta(hours=5)  # the whole fleet was down meanwhile
    job.give_up_running_time()
    state.placement = None
    job.transition(JobPhase.QUEUED, "")
    assert job.delivered_ms() == delivered_ms
