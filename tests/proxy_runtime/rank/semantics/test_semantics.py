"""The device as CUDA has it: scripts that assert what they see, run in a rank against a real device proxy."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import Launcher

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize("name", ["device_index", "flags", "faults", "streams", "pinned", "warnings_of_device"])
def test_script(launcher: Launcher, name: str) -> None:
    (result,) = launcher.run(SCRIPTS / f"{name}.py")
    assert result.code == 0 and result.out.endswith("ok\n"), result.err


def test_a_stream_is_done_whatever_has_been_freed_since(launcher: Launcher) -> None:
    with launcher.start(SCRIPTS / "queries.py") as job:
        assert job.line() == "ready\n"
        job.proxies[0].send_signal(signal.SIGSTOP)
        try:
            rank = job.ranks[0]
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
            assert job.line() == "True True True False True\n"
        finally:
            job.proxies[0].send_signal(signal.SIGCONT)
        assert rank.wait(60) == 0


def test_generators(launcher: Launcher) -> None:
    """Ranks that seed alike draw alike, on devices of their own or on one."""
    results = launcher.run(SCRIPTS / "generators.py", ranks=2, devices=1)
    for result in results:
        assert result.code == 0 and result.out.endswith("ok\n"), result.err
    assert len({result.out.splitlines()[0].split()[1] for result in results}) == 1


def test_memory_limit(launcher: Launcher) -> None:
    launcher.environment["ERGO_DEVICE_MEMORY"] = str(64 << 20)
    (result,) = launcher.run(SCRIPTS / "memory.py")
    assert result.code == 0 and result.out.endswith("ok\n"), result.err


@pytest.mark.parametrize("variable", ["ERGO_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING"])
def test_blocking_launches_raise_at_the_line(launcher: Launcher, variable: str) -> None:
    launcher.environment[variable] = "1"
    (result,) = launcher.run(SCRIPTS / "blocking_faults.py", "embedding")
    assert result.code == 0 and result.out == "ok\n", result.err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["index_select", "scatter", "cross_entropy", "index"])
def test_blocking_launches_of_other_operators(launcher: Launcher, kind: str) -> None:
    launcher.environment["ERGO_LAUNCH_BLOCKING"] = "1"
    (result,) = launcher.run(SCRIPTS / "blocking_faults.py", kind)
    assert result.code == 0 and result.out == "ok\n", result.err


def test_number_of_threads_is_the_device_s_too(launcher: Launcher) -> None:
    """What a kernel computes with N threads natively, it computes on the device after set_num_threads(N)."""
    script = SCRIPTS / "threads.py"
    native = subprocess.run([sys.executable, str(script), "--native"], capture_output=True, text=True, check=True)
    (result,) = launcher.run(script)
    assert result.code == 0, result.err
    assert result.out == native.stdout


def test_nonsense_for_memory_is_said_at_the_start(launcher: Launcher) -> None:
    launcher.environment["ERGO_DEVICE_MEMORY"] = "lots"
    (result,) = launcher.run("import torch")
    assert result.code == 1 and "ERGO_DEVICE_MEMORY is 'lots'" in result.err, result.err
