"""Device time counts until the job leaves `running`, also where it holds no device any more by then."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from temporalio import workflow

from model.ids import DeviceId, Epoch, JobId
from model.job_spec import JobSpec
from model.job_state import JobPhase
from model.placement import Placement
from workflows.job.core import Job
from workflows.job.state import JobState

START = datetime(2026, 1, 1, tzinfo=UTC)
PLACEMENT = Placement(Epoch(1), (DeviceId.parse("node-1@1/cpu-0"), DeviceId.parse("node-1@1/cpu-1")), (0, 1))


@pytest.mark.parametrize("after", [JobPhase.COMPLETED, JobPhase.QUEUED, JobPhase.SUSPENDING])
def test_device_time_of_an_epoch_is_kept(monkeypatch: pytest.MonkeyPatch, after: JobPhase) -> None:
    now = START
    monkeypatch.setattr(workflow, "now", lambda: now)
    monkeypatch.setattr(Job, "_emit_phase", lambda *_: None)
    monkeypatch.setattr(Job, "show", lambda _: None)
    monkeypatch.setattr(workflow.logger, "isEnabledFor", lambda _: False)
    state = JobState(job=JobId("job"), first_run="run", submitted_at=START, phase=JobPhase.STARTING)
    job = Job(JobSpec(apiVersion="ergosphere/v1", argv=("true",), ranks=2), state, lambda _: "")
    state.placement = PLACEMENT
    job.transition(JobPhase.RUNNING, "")
    now = START + timedelta(seconds=3)
    assert job.delivered_ms() == 6000
    if after is not JobPhase.SUSPENDING:
        state.placement = None
    job.transition(after, "")
    now += timedelta(seconds=3)
    assert job.delivered_ms() == 6000
