"""Jobs that come, are moved and go leave nothing in whoever runs them: process, descriptor, thread, mount, file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.end_to_end.harness import EXAMPLES, CutPlan, Script, run

JOBS_RUN = 10
SETTLED = 2
SHORT = Script(EXAMPLES / "mlp_sgd.py", ("--steps", "200"), ranks=2, devices=2)


def held() -> dict[str, object]:
    children = [
        pid
        for pid in os.listdir("/proc")
        if pid.isdigit() and Path(f"/proc/{pid}/stat").exists() and _parent(pid) == os.getpid()
    ]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": len(children),
        "mounts": len(Path("/proc/mounts").read_text().splitlines()),
        "shared memory": len(os.listdir("/dev/shm")),
    }


def _parent(pid: str) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_jobs_leave_nothing_behind(tmp_path: Path, home: Path) -> None:
    found = []
    for n in range(JOBS_RUN):
        outcome = run(SHORT, tmp_path / str(n), CutPlan(n, count=1, live_share=0.3))
        assert outcome.result.code == 0, outcome.result
        assert not list(home.glob("runs/*"))
        found.append(held())
    print(*found, sep="\n")
    for name, settled in found[SETTLED].items():
        # Other jobs of this machine come and go: what is held at the end must have been enough before.
        assert found[-1][name] <= settled, f"{name}: {[each[name] for each in found]}"  # type: ignore[operator]
