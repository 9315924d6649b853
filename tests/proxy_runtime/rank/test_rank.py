"""A rank at work, against a real device proxy on the CPU."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest
from launcher import SCRIPTS, Launcher


@pytest.mark.parametrize("name", ["basics", "elements", "errors", "cuda_only", "recurrent", "composites"])
def test_script(launcher: Launcher, name: str) -> None:
    (result,) = launcher.run(SCRIPTS / f"{name}.py")
    assert result.code == 0 and result.out.endswith("ok\n"), result.err


def test_small_ring(launcher: Launcher) -> None:
    """Messages that fill the ring many times over, copies larger than it included."""
    launcher.ring_bytes = 1 << 16
    (result,) = launcher.run(SCRIPTS / "basics.py")
    assert result.code == 0, result.err


def test_error_at_the_end_of_a_script_fails_the_job(launcher: Launcher) -> None:
    (result,) = launcher.run(SCRIPTS / "late_error.py")
    assert result.code == 1 and "end of script" in result.out
    assert "earlier operation" in result.err, result.err


def test_destructors_of_global_objects_may_use_the_device(launcher: Launcher) -> None:
    program = """
import torch
class Counter:
    def __init__(self): self.total = torch.ones(3, device="cuda")
    def __del__(self): print("counted", self.total.mul(2).sum().item())
counter = Counter()
"""
    for end, code in (("", 0), ("raise ValueError('wrong')", 1)):
        (result,) = launcher.run(program + end)
        assert result.code == code and result.out == "counted 6.0\n", result.err
        assert "Exception ignored" not in result.err, result.err


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("try: torch.cuda._sleep(9)\nexcept RuntimeError: pass\n", "no longer valid"),
        ("torch.cuda._sleep(9)", "refused"),
    ],
)
def test_refused_launch_is_fatal(launcher: Launcher, program: str, sentence: str) -> None:
    """Even if the script goes on and never uses the device again: its results may be wrong."""
    (result,) = launcher.run(f"import torch\nx = torch.ones(3).cuda()\n{program}\nprint('went on')")
    assert result.code == 1 and re.search(sentence, result.err), result.err


def test_dereferenced_address_says_why(launcher: Launcher) -> None:
    program = "import ctypes, torch; ctypes.string_at(torch.ones(3).cuda().data_ptr(), 4)"
    (result,) = launcher.run(program)
    assert result.code == -signal.SIGSEGV and "device proxy" in result.err, result.err


def test_python_kernels_stay_in_the_rank(launcher: Launcher) -> None:
    """Operators that a script defines in Python run there, also after a sweep for late libraries."""
    (result,) = launcher.run(SCRIPTS / "python_kernels.py")
    assert result.code == 0, result.err


def test_dead_device_ends_the_wait(launcher: Launcher) -> None:
    program = "import torch; x = torch.ones(3).cuda(); print(x.sum().item(), flush=True)\nwhile True: x.sum().item()"
    (result,) = launcher.run(program, kill_device_after_output=True)
    assert result.code == 1 and "device proxy of this rank has ended" in result.err, result.err


def test_training_equals_the_cpu_bit_for_bit(launcher: Launcher) -> None:
    script = SCRIPTS / "training.py"
    native = subprocess.run([sys.executable, str(script), "--native"], capture_output=True, text=True, check=True)
    (result,) = launcher.run(script)
    assert result.code == 0, result.err
    assert result.out.splitlines() == native.stdout.splitlines()


@pytest.mark.parametrize(("ranks", "devices"), [(2, 2), (2, 1), (1, 1)])
def test_collectives(launcher: Launcher, ranks: int, devices: int) -> None:
    for rank, result in enumerate(launcher.run(SCRIPTS / "collectives.py", ranks=ranks, devices=devices)):
        assert result.code == 0, f"rank {rank}:\n{result.err}"


@pytest.mark.slow
def test_the_engine_s_thread_ends_no_process(launcher: Launcher) -> None:
    """What it clears up when the interpreter ends was std::terminate, in one to three of eight runs of this script."""
    for _ in range(6):
        (result,) = launcher.run(SCRIPTS / "slow_engine_thread.py")
        assert result.code == 0 and result.out == "end\n", result.err
