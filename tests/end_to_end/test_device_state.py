"""What a script has set on its device, and what it has been told of it, survives a move."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy_runtime.shim.spec import CutRequest
from tests.end_to_end.harness import JOBS, Outcome, Script, evidence, require_equal, run, running
from tests.end_to_end.test_processes import until

SCRIPT = Script(JOBS / "device_state.py")
MEMORY = 64 << 20


@pytest.mark.slow
def test_limit_flags_generators_and_events_survive_a_move(tmp_path: Path) -> None:
    untouched = run(SCRIPT, tmp_path / "untouched", device_memory=MEMORY)
    with running(SCRIPT, tmp_path / "moved", device_memory=MEMORY) as job:
        until(lambda: "PROGRESS 0" in job.logs(0), "the script is in its loop")
        job.cut(CutRequest())
        result = job.wait(240)
        assert result is not None
        logs = [job.logs(0)]
        moved = Outcome(result, evidence(SCRIPT, tmp_path / "moved", logs), logs, list(job.cuts))
    require_equal(untouched, moved, cuts=1)
