"""Kinds of tensors and uses of them beyond plain operators, in a rank and on the CPU: the same digests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launcher import Launcher

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize("name", ["sparse", "compressed", "nested", "uses"])
def test_equals_the_cpu(launcher: Launcher, name: str) -> None:
    script = SCRIPTS / f"{name}.py"
    command = [sys.executable, str(script), "--native"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as native:  # meanwhile
        (result,) = launcher.run(script)
        out, err = native.communicate()
    assert native.returncode == 0, err
    assert result.code == 0, result.err
    assert result.out.splitlines() == out.splitlines() != []


def test_what_cannot_work_raises(launcher: Launcher) -> None:
    (result,) = launcher.run(SCRIPTS / "refused.py")
    assert result.code == 0 and result.out == "ok\n", result.err
