"""What a rank holds, what is left behind, and how a job ends when something of it dies."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from proxy_runtime.errors import ErgoError
from proxy_runtime.job import Job
from proxy_runtime.shim.client import ShimClient, running_jobs
from proxy_runtime.shim.spec import CutRequest
from tests.end_to_end.harness import EXAMPLES, JOBS, ROOT, Script, run, running

ENDLESS = Script(JOBS / "ends.py", ("--step", "1000000", "--steps", "1000000"), ranks=2)


def until(condition: Callable[[], object], what: str, deadline_s: float = 60.0) -> None:
    limit = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < limit, f"{what}: not within {deadline_s} s"
        time.sleep(0.01)


def stepping(job: Job) -> bool:
    return all("PROGRESS 3" in job.logs(rank) for rank in range(job.spec.world_size))


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_rank_holds_no_device_memory_no_channel_descriptor_and_no_socket(tmp_path: Path) -> None:
    with running(ENDLESS, tmp_path) as job:
        until(lambda: stepping(job), "the job runs")
        for pid in job.status()["rank_pids"]:
            targets = []
            for number in os.listdir(f"/proc/{pid}/fd"):
                try:
                    targets.append(os.readlink(f"/proc/{pid}/fd/{number}"))
                except OSError:
                    continue
            assert not [target for target in targets if "memfd" in target or target.startswith("socket:")], targets
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert maps.count("/memfd:ergo-ring") == 2, "the ring, and the pinned memory behind it"
            assert "/dev/nvidia" not in maps
            assert "libcublasLt.so" not in maps.replace("ergo_", "")
            flags = Path(f"/proc/{pid}/smaps").read_text().split("/memfd:ergo-ring")[1].split("VmFlags:")[1]
            assert " dc " in flags.split("\n")[0] + " ", "the ring would be inherited by a fork"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--rank", "1", "--step", "4", "--code", "7"), 7, "rank 1 exited with code 7"),
        (("--rank", "1", "--step", "4", "--hard-code", "9"), 9, "rank 1 exited with code 9"),
        pytest.param(  # quick: a rank that another process kills
            *(("--rank", "0", "--step", "4", "--signal", "SIGKILL"), 137, "rank 0 was killed by SIGKILL"),
            marks=pytest.mark.slow,
        ),
        (("--rank", "0", "--step", "4", "--signal", "SIGSEGV"), 139, "rank 0 was killed by SIGSEGV"),
    ],
)
def test_a_rank_that_ends_takes_the_others_along(
    arguments: tuple[str, ...], code: int, says: str, tmp_path: Path
) -> None:
    outcome = run(Script(JOBS / "ends.py", arguments, ranks=2), tmp_path)
    assert outcome.result.code == code
    assert says in outcome.result.sentence


def test_a_script_that_raises_shows_its_own_traceback_and_code(tmp_path: Path) -> None:
    outcome = run(Script(JOBS / "raises.py", ("--rank", "1", "--step", "4"), ranks=2), tmp_path)
    assert outcome.result.code == 1
    assert "rank 1 exited with code 1" in outcome.result.sentence
    assert "DeliberateError: rank 1 raises at step 4" in outcome.logs[1]
    assert "Traceback" in outcome.logs[1]


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    with running(ENDLESS, tmp_path) as job:
        until(lambda: stepping(job), "the job runs")
        os.kill(job.status()["rank_pids"][1], signal.SIGKILL)
        result = job.wait(30)
        assert result is not None
        assert result.code == 137
        assert "rank 1 was killed by SIGKILL" in result.sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_",
    [CutRequest(stop=True), CutRequest(move=False), CutRequest(), CutRequest(devices=1, keep_processes=True)],
    ids=["suspend", "checkpoint", "move", "resize"],
)
def test_a_rank_killed_while_a_cut_waits_for_a_step_is_in_no_checkpoint(request_: CutRequest, tmp_path: Path) -> None:
    store = tmp_path / "checkpoints"
    with running(ENDLESS, tmp_path / "job", checkpoint_dir=store) as job:
        until(lambda: stepping(job), "the job runs")
        victim = job.status()["rank_pids"][1]
        killer = threading.Timer(2.0, os.kill, (victim, signal.SIGKILL))
        killer.start()
        with suppress(ErgoError):  # it has ended before the answer
            report = job.cut(dataclasses.replace(request_, at_step=1_000_000, step_deadline_s=20.0))
            assert report.outcome in ("called-off", "job-ended"), report
        result = job.wait(30)
        assert result is not None
        assert result.code == 137
        assert "rank 1 was killed by SIGKILL" in result.sentence
    assert not list(store.glob("tenants/*/jobs/*/HEAD"))


def test_a_killed_proxy_ends_the_job_and_its_last_checkpoint_stays_good(tmp_path: Path) -> None:
    store = tmp_path / "checkpoints"
    with running(ENDLESS, tmp_path / "job", checkpoint_dir=store) as job:
        until(lambda: stepping(job), "the job runs")
        report = job.cut(CutRequest(move=False))
        assert report.outcome == "checkpointed", report.error
        os.kill(job.status()["proxy_pids"][1], signal.SIGKILL)
        result = job.wait(30)
        assert result is not None
        assert result.code != 0
        assert "device proxy 1 died (without a word: it was killed)" in result.sentence
    from proxy_runtime.checkpoint import Store

    Store.open(store, create=False).read().verify()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_ergo_run_leaves_nothing(number: signal.Signals, tmp_path: Path, home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "run", "--nproc", "2", "--cut-every", "500ms", "--dir", str(tmp_path),
         str(JOBS / "ignores_sigterm.py")],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until(lambda: list(home.glob("runs/*/e*/volume/private/logs/*.log")), "the job was started")
    time.sleep(1.5)  # somewhere in its start, its run or one of its cuts
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "interrupted" in said
    assert not list(home.glob("runs/*"))


@pytest.mark.slow
def test_a_second_signal_kills_what_a_shim_that_stands_still_does_not_end(tmp_path: Path, home: Path) -> None:
    errors, directory = tmp_path / "errors", tmp_path / "job"
    directory.mkdir()
    with errors.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli.main", "run", "--nproc", "2", "--dir", str(directory), str(ENDLESS.path),
             *ENDLESS.arguments],
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=file,
        )  # fmt: skip
    until(lambda: [layout for layout in running_jobs() if ShimClient(layout).status().get("step")], "the job runs")
    (layout,) = running_jobs()
    client = ShimClient(layout)
    status, shim = client.status(), client.call("hello")["pid"]
    os.kill(shim, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    until(lambda: "interrupt again" in errors.read_text(), "it says that the job is still ending")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    assert "interrupted by SIGINT again: everything of the job was killed." in errors.read_text()
    for pid in (shim, *status["rank_pids"], *status["proxy_pids"]):
        until(lambda pid=pid: gone(pid), f"process {pid} is gone")
    assert not list(home.glob("runs/*"))


def test_output_that_cannot_be_written_ends_the_job_with_a_sentence(tmp_path: Path, home: Path) -> None:
    command = [sys.executable, "-m", "cli.main", "run", "--dir", str(tmp_path), str(ENDLESS.path), *ENDLESS.arguments]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=full, stderr=subprocess.PIPE, text=True,
            timeout=120,
        )  # fmt: skip
    assert done.returncode == 1 and "the job's output cannot be written (No space left" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_killed_ergo_run_leaves_nothing(tmp_path: Path, home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "run", "--dir", str(tmp_path), str(JOBS / "ignores_sigterm.py")],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until(lambda: list(home.glob("runs/*/shim.sock")), "the shim runs")
    process.kill()
    process.wait()
    until(lambda: not list(home.glob("runs/*")), "the shim has ended and cleaned up")


def test_what_a_killed_run_left_is_swept_by_the_next(tmp_path: Path, home: Path) -> None:
    script = tmp_path / "writes.py"
    script.write_text("import time\nopen('written.txt', 'w').write('by the job')\ntime.sleep(600)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "run", "--dir", str(tmp_path), str(script)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until(lambda: list(home.glob("runs/*/e0/volume/directory/written.txt")), "the job has written")
    (layout,) = running_jobs()
    client = ShimClient(layout)
    process.send_signal(signal.SIGSTOP)  # it cannot clean up either
    os.kill(client.call("hello")["pid"], signal.SIGKILL)
    process.kill()
    process.wait()
    assert list(home.glob("runs/*"))
    done = subprocess.run([sys.executable, "-m", "cli.main", "run", "-m", "this"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0
    assert not list(home.glob("runs/*"))
    assert (tmp_path / "written.txt").read_text() == "by the job"


def test_a_killed_shim_leaves_nothing(tmp_path: Path) -> None:
    with running(ENDLESS, tmp_path) as job:
        until(lambda: stepping(job), "the job runs")
        status = job.status()
        os.kill(job.client.call("hello")["pid"], signal.SIGKILL)
        result = job.wait(30)
        assert result is not None
        assert "shim" in result.sentence
        for pid in (*status["rank_pids"], *status["proxy_pids"]):
            until(lambda pid=pid: gone(pid), f"process {pid} is gone")


def test_the_files_of_a_job_come_home_and_its_directory_was_untouched_meanwhile(tmp_path: Path) -> None:
    outcome = run(Script(EXAMPLES / "mlp_sgd.py", ("--steps", "20", "--out", "results")), tmp_path)
    assert outcome.result.code == 0
    assert (tmp_path / "results" / "losses-rank0.json").exists()


def test_modules_of_the_user_are_never_shadowed(tmp_path: Path) -> None:
    site = JOBS / "shadow" / "site"
    script = Script(JOBS / "shadow" / "main.py", ("--flag", "a b"), env=(("PYTHONPATH", str(site)),))
    outcome = run(script, tmp_path)
    assert outcome.result.code == 0, outcome.logs[0]
    assert "result of rank 0" in outcome.evidence


def test_a_job_that_outlives_its_starter_can_be_found_and_ended(tmp_path: Path) -> None:
    with running(ENDLESS, tmp_path, linger=True) as job:
        until(lambda: stepping(job), "the job runs")
        job.client.close()
        found = [layout for layout in running_jobs() if layout.job_id == job.spec.job_id]
        assert len(found) == 1
        again = ShimClient(found[0])
        assert again.status()["alive"]
        again.end(0, "ended by the test.")
        result = job.wait(30)
        assert result is not None
        assert result.code == 0
        with pytest.raises((ErgoError, OSError)):
            again.status()
