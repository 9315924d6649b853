"""A width that does not divide a job's ranks is refused in one sentence, wherever it is asked for; the job runs on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from cli.main import app
from proxy_runtime.errors import ErgoError
from proxy_runtime.job import Job, JobOptions
from proxy_runtime.shim.client import running_jobs
from proxy_runtime.shim.spec import CutRequest
from tests.end_to_end.harness import JOBS, Script, running
from tests.end_to_end.test_processes import stepping, until

THREE = Script(JOBS / "ends.py", ("--step", "1000000", "--steps", "1000000"), ranks=3, devices=1)
UNEVEN = "3 ranks cannot be shared out evenly over 2 devices; possible are 1, 3."
TOO_MANY = "A job of 3 ranks cannot use 4 devices: it has at most one for each rank."
NONE = "greater than or equal to 1"
STAYS = ("epoch", "width", "rank_pids", "proxy_pids")
ERGO: Any = typer.main.get_command(app)


def refused(capfd: pytest.CaptureFixture[str], line: str) -> str:
    """What a command says that is not done, for wrong usage its message."""
    capfd.readouterr()
    try:
        code = ERGO.main(line.split(), prog_name="ergo", standalone_mode=False)
    except ErgoError as error:
        return str(error)
    except Exception as error:
        if getattr(error, "exit_code", None) != 2:
            raise
        return f"usage: {error.format_message()}"  # type: ignore[attr-defined]
    assert code == 1, "it was done"
    return " ".join(capfd.readouterr().err.split())


def test_what_runs_runs_on_and_what_is_suspended_can_be_continued(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    with running(THREE, tmp_path / "job", checkpoint_dir=store) as job:
        until(lambda: stepping(job), "the job runs")
        before = job.status()
        for command in ("local resize", "local cut"):
            assert refused(capfd, f"{command} --devices=2") == UNEVEN
            assert NONE in refused(capfd, f"{command} --devices=0")
        assert refused(capfd, "local resize --devices=4") == TOO_MANY
        assert "4 devices" in refused(capfd, "local cut --devices=4")
        after = job.status()
        assert {name: after[name] for name in STAYS} == {name: before[name] for name in STAYS}
        assert not list(store.glob("tenants/*/jobs/*/HEAD")), "no checkpoint was taken"
        require_progress(job)
        assert job.cut(CutRequest(stop=True)).outcome == "stopped"
        job.wait(30)

    assert refused(capfd, f"run --restore={store} --devices=2") == UNEVEN
    assert "4 devices for 3 ranks" in refused(capfd, f"run --restore={store} --devices=4")
    assert NONE in refused(capfd, f"run --restore={store} --devices=0")
    assert not running_jobs(), "nothing was started"
    again = Job.restore("HEAD", JobOptions(argv=(), devices=3, checkpoint_dir=store, keep_run=True))
    try:
        assert again.status()["width"] == 3
        require_progress(again)
    finally:
        again.end()
        again.wait(30)


def require_progress(job: Job) -> None:
    seen = [len(job.logs(rank)) for rank in range(3)]
    until(lambda: all(len(job.logs(rank)) > seen[rank] + 50 for rank in range(3)), "the job runs on")
