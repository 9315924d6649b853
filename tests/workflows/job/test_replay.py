"""Workflows that an older build began go on with this one: committed histories are replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
from temporalio.client import WorkflowFailureError, WorkflowHistory
from temporalio.worker import Replayer

from infra.converter import DATA_CONVERTER
from infra.job_worker import workflow_runner
from tests.workflows.job.fleet import Fleet
from workflows.job import JobWorkflow

HISTORIES = sorted((Path(__file__).parents[2] / "golden" / "histories" / "job").glob("*.json"))


def test_there_are_histories() -> None:
    assert len(HISTORIES) >= 5


async def test_only_a_job_that_an_older_build_began_has_widths_that_do_not_divide_its_ranks(fleet: Fleet) -> None:
    job = await fleet.submit(ranks=4, min_width=3)
    with pytest.raises(WorkflowFailureError) as failure:
        await job.workflow.result()
    assert "4 ranks cannot be shared out evenly over 3 devices" in str(failure.value.cause)


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
async def test_a_golden_history_is_replayed(path: Path) -> None:
    replayer = Replayer(workflows=[JobWorkflow], data_converter=DATA_CONVERTER, workflow_runner=workflow_runner())
    history = WorkflowHistory.from_json(path.stem, path.read_text())
    await replayer.replay_workflow(history)
