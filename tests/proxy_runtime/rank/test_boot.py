"""The start-up hook: what a rank's process looks like before user code, and what a bad channel says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import Launcher

_STATE = """
import os, re, sys
assert "torch" not in sys.modules
assert "ERGO_CHANNEL" not in os.environ
for n in os.listdir("/proc/self/fd"):
    try:
        link = os.readlink(f"/proc/self/fd/{n}")
    except OSError:
        continue
    assert "memfd" not in link and not link.startswith("socket:"), link
maps = open("/proc/self/smaps").read()
ring = maps[maps.index("memfd:ergo-ring"):]
assert " dc " in re.search("VmFlags:(.*)", ring).group(1) + " ", "not MADV_DONTFORK"
child = os.fork()
if child == 0:  # it may have the pinned memory behind the ring, which begins at offset 0
    there = [line.split() for line in open("/proc/self/maps") if "memfd:ergo-ring" in line]
    os._exit(any(int(words[2], 16) == 0 for words in there))
assert os.waitpid(child, 0)[1] == 0
import user_marker
import ergo_rank
print("ok")
"""


def test_process_state_before_user_code(launcher: Launcher, tmp_path: Path) -> None:
    hook = "import sys, types\nsys.modules['user_marker'] = types.ModuleType('m')\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    (result,) = launcher.run(_STATE, python_path=str(tmp_path))
    assert (result.code, result.out) == (0, "ok\n"), result.err


def test_nothing_happens_without_a_channel(launcher: Launcher) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "ERGO_CHANNEL"}
    environment["PYTHONPATH"] = str(launcher.rank_dir)
    program = "import sys, torch; print('ergo_rank._interposer' in sys.modules, torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.split()[0] == "False", done.stderr


@pytest.mark.parametrize(
    ("channel", "sentence"),
    [
        ("nonsense", "not <descriptor>"),
        ("250:{rank_dir}:cpu", "cannot stat the channel"),
        ("{null}:{rank_dir}:cpu", "too small"),
        ("{ring}:{rank_dir}:tpu", "not <descriptor>"),
    ],
)
def test_bad_channel_ends_the_rank(launcher: Launcher, channel: str, sentence: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        text = channel.format(rank_dir=launcher.rank_dir, null=null, ring=null)
        done = subprocess.run(
            [sys.executable, "-c", "print('user code ran')"],
            env={**os.environ, "PYTHONPATH": str(launcher.rank_dir), "ERGO_CHANNEL": text},
            capture_output=True,
            text=True,
            pass_fds=[null],
        )
    finally:
        os.close(null)
    assert done.returncode == 1 and done.stdout == ""
    assert sentence in done.stderr and done.stderr.count("\n") == 1


_BINDINGS = """
import importlib.util, sys, torch
loaded = {name.partition(".")[0] for name in sys.modules} & {"cuda", "pynvml"}
assert not loaded, f"torch has loaded {loaded}"
torch.ones(1, device="cuda").sum().item()
from cuda.bindings import driver
assert driver.cuInit
if importlib.util.find_spec("pynvml"):
    import pynvml
    assert pynvml.nvmlInit
for ask in (torch.cuda.utilization, torch.cuda.temperature, torch.cuda.memory_usage):
    try:
        raise AssertionError(f"{ask.__name__} returned {ask()}")
    except RuntimeError as error:
        assert "NVML" in str(error), error
print("ok")
"""


def test_only_torch_does_without_what_drives_a_gpu(launcher: Launcher) -> None:
    (result,) = launcher.run(_BINDINGS)
    assert (result.code, result.out) == (0, "ok\n"), result.err


def test_bindings_that_a_script_has_imported_stay(launcher: Launcher) -> None:
    program = "import cuda.bindings.driver as d, torch.cuda._utils as u; print(u._cuda_bindings_driver is d)"
    (result,) = launcher.run(program)
    assert (result.code, result.out) == (0, "True\n"), result.err
