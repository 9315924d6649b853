"""What people read about a cut."""

from __future__ import annotations

import pytest

from cli.console import cut_sentence
from proxy_runtime.shim.spec import CutReport

DOWN = {"downtime": 220.0}
LATE = " (the step asked for was not reached in time)"


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (CutReport("moved", epoch=1, devices=2, steps=[443, 443], pending_operations=1, ms=DOWN),
         "cut at step 443: moved to 2 devices, epoch 1, down 0.22 s, 1 operation pending"),
        (CutReport("moved", epoch=3, devices=1, steps=[7], reached_step=False),
         f"cut at step 7{LATE}: moved to 1 device, epoch 3, 0 operations pending"),
        (CutReport("checkpointed", steps=[5, 6], pending_operations=2, checkpoint="ck-2", ms=DOWN),
         "cut at steps 5-6: checkpointed, epoch 0, down 0.22 s, 2 operations pending, checkpoint ck-2"),
        (CutReport("job-ended"), "cut: the job had ended already"),
        (CutReport(error="no room."), "cut called off, the job runs on: no room."),
    ],
)  # fmt: skip
def test_a_cut_is_told_with_the_width_at_which_the_job_goes_on(report: CutReport, sentence: str) -> None:
    assert cut_sentence(report) == sentence
