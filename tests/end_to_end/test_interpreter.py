"""A job with an interpreter of its own: its device computes with the torch that it sees, before and after a restore.

`ERGO_OTHER_PYTHON` names an interpreter with another torch or Python; without it, one with ours in another place.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from proxy_runtime.checkpoint import Store
from proxy_runtime.job import Job, JobOptions
from proxy_runtime.shim.spec import CutRequest
from tests.end_to_end.harness import EXAMPLES, ROOT
from tests.end_to_end.test_processes import until

SCRIPT = EXAMPLES / "char_gpt.py"
ARGUMENTS = (
    *("--d-model", "64", "--layers", "2", "--context", "32", "--batch", "4", "--dropout", "0.1"),
    *("--steps", "150", "--log-every", "1000"),
)
WAIT_S = 240


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if named := os.environ.get("ERGO_OTHER_PYTHON"):
        return Path(named)
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    found = folder / "bin" / "python"
    subprocess.run([found, ROOT / "scripts" / "stand_on.py", sys.prefix], check=True)
    return found


def digests(text: str) -> list[str]:
    return [line.partition("losses")[2] for line in text.splitlines() if "losses sha256" in line]


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a build for another torch takes minutes, half an hour where ten others build
def test_the_numbers_are_those_of_its_own_torch_also_when_it_goes_on(python: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_NATIVE_JIT": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(python), str(SCRIPT), *ARGUMENTS, "--out", str(tmp_path / "native")]
    native = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert len(digests(native.stdout)) == 1

    (tmp_path / "job").mkdir()
    store = tmp_path / "store"
    options = JobOptions(
        (str(python), str(SCRIPT), *ARGUMENTS),
        cwd=tmp_path / "job",
        checkpoint_dir=store,
        python=str(python),
        keep_run=True,
    )
    job = Job.start(options)
    until(lambda: min(job.status().get("step", [0])) >= 5, "the job is at step 5")
    report = job.cut(CutRequest(stop=True, at_step=60))
    assert report.outcome == "stopped", report.error
    assert job.wait(WAIT_S).code == 75  # type: ignore[union-attr]
    header = Store.open(store, create=False).read("HEAD").manifest.header
    assert header.python == str(python)

    again = Job.restore("HEAD", JobOptions(argv=(), devices=0, checkpoint_dir=store, keep_run=True))
    result = again.wait(WAIT_S)
    assert result is not None
    assert result.code == 0, result.sentence
    assert digests(again.logs(0)) == digests(native.stdout)
