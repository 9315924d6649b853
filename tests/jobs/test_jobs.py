"""The jobs that cut tests interrupt, run natively: deterministic, and as bad as they say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

JOBS = Path(__file__).resolve().parent
SHORT = {
    "evaluation.py": ["--rounds", "30", "--pause", "0.01"],
    "copies.py": ["--rounds", "4", "--size", "100000"],
    "async_error.py": ["--rounds", "3", "--pause", "0"],
    "loader_fork.py": ["--epochs", "2"],
    "threads.py": ["--rounds", "50"],
    "volume.py": ["--rounds", "20"],
    "subprocesses.py": ["--rounds", "8"],
}
RANKS = {
    "ddp_skew.py": (2, ["--epochs", "4", "--skew", "0.001"]),
    "subgroups.py": (3, ["--epochs", "2", "--skew", "0.001"]),
    "ring.py": (2, ["--rounds", "20", "--skew", "0.001"]),
    "fsdp2.py": (2, ["--steps", "4"]),
}


def run(
    cwd: Path, script: str, arguments: list[str], ranks: int = 0, python_path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A finished run by plain python (`ranks` 0) or by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    foreign = ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    if python_path is not None:
        environment["PYTHONPATH"] = str(python_path)
    return subprocess.run(
        [sys.executable, *launcher, str(JOBS / script), *arguments],
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def results(done: subprocess.CompletedProcess[str]) -> dict[int, str]:
    """Digest by rank of a run that went well."""
    assert done.returncode == 0, done.stdout + done.stderr
    return {int(rank): digest for digest, rank in re.findall(r"RESULT (\w{64}) rank (\d+)\n", done.stdout)}


@pytest.mark.slow
@pytest.mark.parametrize("script", SHORT)
def test_one_rank_is_deterministic(tmp_path: Path, script: str) -> None:
    first = results(run(tmp_path, script, SHORT[script]))
    assert set(first) == {0}
    assert results(run(tmp_path, script, SHORT[script])) == first


@pytest.mark.slow
@pytest.mark.parametrize("script", RANKS)
def test_several_ranks_are_deterministic(tmp_path: Path, script: str) -> None:
    ranks, arguments = RANKS[script]
    first = results(run(tmp_path, script, arguments, ranks))
    assert set(first) == set(range(ranks))
    assert len(set(first.values())) == ranks
    assert results(run(tmp_path, script, arguments, ranks)) == first


def test_too_few_ranks_is_a_sentence(tmp_path: Path) -> None:
    done = run(tmp_path, "ring.py", [])
    assert done.returncode == 1
    assert "needs at least 2 ranks" in done.stderr


def test_raises_with_its_own_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "raises.py", ["--step", "3"])
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("DeliberateError: rank 0 raises at step 3")
    assert done.stdout.splitlines()[-1] == "PROGRESS 2"


@pytest.mark.parametrize(("arguments", "code"), [([], 7), (["--signal", "SIGKILL"], -9)], ids=["exits", "killed"])
def test_ends_as_told(tmp_path: Path, arguments: list[str], code: int) -> None:
    done = run(tmp_path, "ends.py", ["--step", "2", *arguments])
    assert done.returncode == code
    assert "RESULT" not in done.stdout


def test_ignores_sigterm(tmp_path: Path) -> None:
    command = [sys.executable, str(JOBS / "ignores_sigterm.py"), "--seconds", "60"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        try:
            assert process.stdout.readline() == "PROGRESS 0\n"
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                process.send_signal(number)
            # Progress after the signals: lines printed before they arrived cannot be this many.
            for _ in range(3):
                assert process.stdout.readline().startswith("PROGRESS ")
            assert process.poll() is None
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL


def test_shadow_sees_its_own_modules(tmp_path: Path) -> None:
    site = JOBS / "shadow" / "site"
    assert set(results(run(tmp_path, "shadow/main.py", ["--flag", "a b"], python_path=site))) == {0}
    without = run(tmp_path, "shadow/main.py", ["--flag", "a b"])
    assert without.returncode == 1
    assert "the user's sitecustomize did not run" in without.stderr


@pytest.mark.slow
def test_volume_notices_a_line_written_twice(tmp_path: Path) -> None:
    """What a restore without its files would do: here another process adds a line while the job runs."""
    command = [sys.executable, str(JOBS / "volume.py"), "--rounds", "2000"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "PROGRESS 0\n"
        with (tmp_path / "volume/rank0/append.txt").open("a") as file:
            file.write("again\n")
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "do not hold every line once" in errors
