"""Continuing a checkpoint later: in another directory, on other devices, and when something about it is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import cli.main
from proxy_runtime.checkpoint import Store
from proxy_runtime.errors import ErgoError
from proxy_runtime.job import Job, JobOptions
from proxy_runtime.shim.spec import CutRequest
from tests.end_to_end.harness import EXAMPLES, ROOT, Outcome, Script, evidence, running
from tests.end_to_end.test_processes import until

GPT = Script(
    EXAMPLES / "char_gpt.py",
    ("--d-model", "64", "--layers", "2", "--context", "32", "--batch", "4", "--dropout", "0.1", "--steps", "150"),
    ranks=2,
)


@pytest.fixture(scope="module")
def suspended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that holds a checkpoint of `GPT` at step 60, and the directory it ran in beside it."""
    from proxy_runtime import build

    build.ensure()
    base = tmp_path_factory.mktemp("suspended")
    with running(GPT, base / "job", checkpoint_dir=base / "store") as job:
        until(lambda: min(job.status().get("step", [0])) >= 5, "the job is at step 5")
        report = job.cut(CutRequest(stop=True, at_step=60))
        assert report.outcome == "stopped", report.error
        assert report.steps == [60, 60]
        result = job.wait(30)
        assert result is not None
        assert result.code == 75
        assert "--restore" in result.sentence
    return base


def resume(store: Path, **options: object) -> tuple[Job, int, str]:
    job = Job.restore("HEAD", JobOptions(argv=(), devices=0, checkpoint_dir=store, keep_run=True, **options))  # type: ignore[arg-type]
    result = job.wait(240)
    assert result is not None
    return job, result.code, result.sentence


@pytest.mark.parametrize("devices", [2, 1])
def test_continued_on_other_devices_in_another_directory(
    devices: int, suspended: Path, untouched: Callable[[Script], Outcome], tmp_path: Path
) -> None:
    reference = untouched(GPT)
    store = tmp_path / "store"
    shutil.copytree(suspended / "store", store)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    gone = suspended / "gone"
    (suspended / "job").rename(gone)  # as on a node that has never seen the job
    with pytest.raises(ErgoError, match="--dir"):
        resume(store)
    job = Job.restore("HEAD", JobOptions(argv=(), devices=devices, checkpoint_dir=store, cwd=elsewhere, keep_run=True))
    assert job.status()["width"] == devices
    result = job.wait(240)
    assert result is not None
    assert result.code == 0, result.sentence
    logs = [job.logs(rank) for rank in range(2)]
    (suspended / "job").rmdir()  # the mount point that was made for it
    gone.rename(suspended / "job")
    assert evidence(GPT, elsewhere, logs) == reference.evidence


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def files_of_each_kind(store: Path) -> dict[str, Path]:
    """One file of every kind that a store has, by its kind."""
    found: dict[str, Path] = {}
    for path in sorted(store.rglob("*")):
        if path.is_file() and path.stat().st_size > 0:
            kind = path.name if path.suffix == "" and "manifests" not in path.parts else path.suffix or "manifest"
            found.setdefault(kind, path)
    return found


def test_a_flipped_byte_in_each_kind_of_file_is_one_sentence(suspended: Path, tmp_path: Path) -> None:
    kinds = files_of_each_kind(suspended / "store")
    assert len(kinds) >= 4, kinds
    for kind, path in kinds.items():
        store = tmp_path / kind.strip(".")
        shutil.copytree(suspended / "store", store)
        flip_a_byte(store / path.relative_to(suspended / "store"))
        with pytest.raises(ErgoError) as caught:
            resume(store)
        assert caught.value.code.startswith(("checkpoint.", "model.")), (kind, caught.value)
        assert "Traceback" not in str(caught.value)
        shutil.rmtree(store)


def test_a_checkpoint_of_another_build_says_so(suspended: Path, tmp_path: Path, home: Path) -> None:
    (home / "builds").unlink()
    (home / "builds").mkdir()
    with pytest.raises(ErgoError, match="build"):
        resume(suspended / "store")


def test_a_file_missing_on_restore_is_named(tmp_path: Path) -> None:
    program = tmp_path / "job" / "holds.py"
    program.parent.mkdir()
    program.write_text(
        "import time, torch\nfile = open(FILE)\nx = torch.ones(4, device='cuda')\n"
        "print('PROGRESS 3', flush=True)\nwhile True:\n    x += 1; x.sum().item(); time.sleep(0.01)\n".replace(
            "FILE", repr(str(tmp_path / "outside.txt"))
        )
    )
    (tmp_path / "outside.txt").write_text("data")
    script = Script(program)
    with running(script, tmp_path / "job", checkpoint_dir=tmp_path / "store") as job:
        until(lambda: "PROGRESS 3" in job.logs(0), "the job runs")
        assert job.cut(CutRequest(stop=True)).outcome == "stopped"
        job.wait(30)
    (tmp_path / "outside.txt").unlink()
    with pytest.raises(ErgoError, match=r"outside\.txt"):
        resume(tmp_path / "store")
    Store.open(tmp_path / "store", create=False).read().verify()


def test_a_cut_that_fails_leaves_the_job_running(tmp_path: Path, untouched: Callable[[Script], Outcome]) -> None:
    """A checkpoint directory on a full disk: every cut is called off, and the bits are those of the untouched run."""
    reference = untouched(GPT)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    try:
        with running(GPT, tmp_path / "job", checkpoint_dir=disk / "store") as job:
            until(lambda: job.ended or min(job.status().get("step", [0])) >= 20, "the job is at step 20")
            reports = [job.cut(CutRequest()), job.cut(CutRequest(move=False))]
            result = job.wait(240)
            logs = [job.logs(rank) for rank in range(2)]
        assert [report.outcome for report in reports] == ["called-off", "called-off"]
        assert all(report.code == "checkpoint.no-space" for report in reports), [report.error for report in reports]
        assert result is not None
        assert result.code == 0
        assert evidence(GPT, tmp_path / "job", logs) == reference.evidence
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


BAD_INPUT = [
    (["run", "missing.py"], 1, "missing.py does not exist"),
    (["run"], 2, "a script is needed"),
    (["run", "--nproc", "0", "x.py"], 2, "--nproc"),
    (["run", "--nproc", "1", "--devices", "2", "EXISTING"], 1, "2 devices for 1 rank:"),
    (["run", "--nproc", "4", "--devices", "3", "EXISTING"], 1, "evenly over 3 devices; possible are 1, 2, 4."),
    (["run", "--cut-every", "soon", "EXISTING"], 2, "not a duration"),
    (["run", "--transport", "carrier-pigeon", "EXISTING"], 2, "neither shm nor tcp"),
    (["run", "--python", "/nonexistent/python", "EXISTING"], 1, "/nonexistent/python"),
    (["run", "--dir", "/nonexistent", "EXISTING"], 1, "/nonexistent"),
    (["run", "--restore", "/nonexistent"], 1, "/nonexistent"),
    (["run", "--restore", "/nonexistent", "EXISTING"], 2, "its own script"),
    (["run", "--checkpoint", "ck-1", "EXISTING"], 2, "only with --restore"),
    (["run", "--json-report", "/nonexistent/report", "EXISTING"], 2, "/nonexistent is not a directory"),
    (["run", "--json-report", ".", "EXISTING"], 2, ". is a directory"),
    (["run", "--device-memory", "99999999TiB", "EXISTING"], 2, "must be less than 2**63"),
    (["run", "--nprocs", "2", "EXISTING"], 2, "no option --nprocs"),
    (["run", "--nproc", "100000", "--devices", "1", "EXISTING"], 1, "do not fit this machine"),
    (["run", "--checkpoint-dir", "existing.py", "EXISTING"], 1, "existing.py is not a checkpoint directory"),
    (["local", "cut"], 1, "no job is running"),
    (["local", "cut", "run-00000000"], 1, "no job run-00000000"),
    (["local", "resize", "run-00000000", "--devices", "2"], 1, "no job run-00000000"),
]


@pytest.mark.parametrize(("arguments", "code", "says"), BAD_INPUT, ids=lambda value: str(value)[:40])
def test_bad_input_is_one_sentence(
    arguments: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "existing.py").write_text("print('ran')\n")
    command = [str(tmp_path / "existing.py") if word == "EXISTING" else word for word in arguments]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ergo", *command])
    monkeypatch.setattr(cli.main, "_exit", sys.exit)  # its own ends this process, too
    with pytest.raises(SystemExit) as ended:
        cli.main.main()
    said = capfd.readouterr().err
    assert ended.value.code == code, said
    assert says in " ".join(said.split()).replace("│ ", ""), said
    assert "Traceback" not in said
    assert not list(home.glob("runs/*"))


def test_without_the_privilege_is_one_sentence(tmp_path: Path, home: Path) -> None:
    script = tmp_path / "existing.py"
    script.write_text("print('ran')\n")
    done = subprocess.run(
        ["setpriv", "--bounding-set", "-sys_admin", sys.executable, "-m", "cli.main", "run", str(script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1
    assert "root" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert not list(home.glob("runs/*"))
