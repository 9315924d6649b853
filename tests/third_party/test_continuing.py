"""Jobs with other people's libraries that are suspended and continued: the numbers of a run that nobody touched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from model.job_state import JobPhase
from proxy_runtime.job import Job, JobOptions
from proxy_runtime.shim.spec import CutRequest
from tests.end_to_end.test_processes import until
from tests.fleet.harness import LocalFleet
from tests.third_party.running import HERE, numbers
from tests.third_party.test_third_party import PYTHON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment that `make third-party` makes"),
]
_WAIT_S = 300
_LAUNCH = ("launch", "--num_processes", "2", "--multi_gpu", "--mixed_precision", "no")
_SCRIPTS = HERE / "scripts"


def _options(name: str, folder: Path, *arguments: str) -> JobOptions:
    folder.mkdir()
    rest = {"cwd": folder, "python": str(PYTHON), "keep_run": True, "checkpoint_dir": folder.with_suffix(".store")}
    script = str(_SCRIPTS / f"{name}.py")
    if name == "accelerate_launch":
        command = (str(PYTHON.parent / "accelerate"), *_LAUNCH, script, *arguments)
        return JobOptions(command, devices=2, pack="node", **rest)  # type: ignore[arg-type]
    return JobOptions((str(PYTHON), script), **rest)  # type: ignore[arg-type]


def _ended(job: Job) -> list[str]:
    result = job.wait(_WAIT_S)
    assert result is not None
    assert result.code == 0, f"{result.sentence}\n{job.logs(0)[-2000:]}"
    return numbers(job.logs(0))


@pytest.mark.parametrize("name", ["late_library", "accelerate_launch"])
def test_suspended_and_continued(name: str, tmp_path: Path) -> None:
    untouched = _ended(Job.start(_options(name, tmp_path / "untouched")))
    assert len(untouched) > 5

    options = _options(name, tmp_path / "suspended")
    job = Job.start(options)
    until(lambda: "loss" in job.logs(0), "the job has begun")
    report = job.cut(CutRequest(stop=True))
    assert report.outcome == "stopped", report.error
    suspended = job.wait(_WAIT_S)
    assert suspended is not None and suspended.code == 75, suspended
    assert len(numbers(job.logs(0))) < len(untouched)

    again = Job.restore("HEAD", JobOptions((), devices=0, checkpoint_dir=options.checkpoint_dir, keep_run=True))
    assert _ended(again) == untouched


def test_accelerate_launch_on_a_fleet_is_moved(tmp_path: Path) -> None:
    """The command is named by its path: a node need not have such libraries beside its own interpreter."""
    arguments = ("accelerate_launch", "1500")
    untouched = _ended(Job.start(_options(arguments[0], tmp_path / "untouched", arguments[1])))
    assert len(untouched) > 70

    directory = tmp_path / "submitted"
    directory.mkdir()
    for name in ("accelerate_launch.py", "report.py"):
        shutil.copy(_SCRIPTS / name, directory)
    fleet = LocalFleet(tmp_path / "fleet")
    fleet.up("--nodes", "2", "--devices", "2")
    try:
        options = ("--pack", "node", "--devices", "2", "--tier", "basic", "--env", "OMP_NUM_THREADS=1")
        command = (str(PYTHON.parent / "accelerate"), *_LAUNCH, "accelerate_launch.py", arguments[1])
        job = fleet.submit(directory, *options, *command)
        fleet.until_step(job, 20)
        source = fleet.node_of(job).name
        fleet.ergo("migrate", job, "--to", "node-2" if source == "node-1" else "node-1", "--wait")
        view = fleet.until_phase(job, JobPhase.COMPLETED)
        assert (view.moves, view.recoveries) == (1, 0), view.transitions
        assert all(device.node.name != source for device in view.transitions[-2].devices)
        assert numbers(fleet.ergo("logs", job)) == untouched
    finally:
        fleet.down()
