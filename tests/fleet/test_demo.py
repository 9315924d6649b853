"""`make demo`: its verdict, and that an interruption leaves nothing behind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from scripts.demo.report import compare
from tests.fleet.harness import ROOT


def evidence(directory: Path, losses: list[float], weights: str) -> Path:
    directory.mkdir()
    report = {"losses": [loss.hex() for loss in losses], "weights_sha256": weights}
    (directory / "losses-rank0.json").write_text(json.dumps(report))
    (directory / "weights.pt").write_text(weights)
    return directory


@pytest.mark.parametrize(
    ("losses", "weights", "equal"),
    [([1.0, 2.0], "w", True), ([1.0, 2.0000000000000004], "w", False), ([1.0, 2.0], "v", False)],
)
def test_one_bit_is_seen(tmp_path, losses, weights, equal):
    out = io.StringIO()
    untouched = evidence(tmp_path / "untouched", [1.0, 2.0], "w")
    touched = evidence(tmp_path / "touched", losses, weights)
    view = SimpleNamespace(id="job")
    assert compare(Console(file=out, width=160), view, 1, 2, touched, untouched) is equal
    assert ("NO" in out.getvalue()) is not equal


def test_missing_losses_are_no_verdict(tmp_path):
    untouched = evidence(tmp_path / "untouched", [1.0], "w")
    with pytest.raises(ValueError, match="rank 0 has 1 losses, not 2"):
        compare(Console(file=io.StringIO()), SimpleNamespace(id="job"), 1, 2, untouched, untouched)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("heard", ["$ ergo up", "The fleet is up", "$ ergo submit --tier premium", "$ ergo migrate"])
def test_an_interruption_leaves_nothing_behind(tmp_path, heard):
    # A directory of its own for temporary files marks everything that belongs to this demo.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    demo = subprocess.Popen(
        [sys.executable, "-m", "scripts.demo"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C reaches the whole group
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if heard in line:
            break
    time.sleep(0.3)
    os.killpg(demo.pid, signal.SIGINT)
    rest = demo.stdout.read()
    assert demo.wait(60) == 130, rest
    left = [process for process in psutil.process_iter() if mentions(process, str(tmp_path))]
    assert not left, f"{[(process.pid, process.cmdline()) for process in left]}\n{rest}"
    assert not list(tmp_path.iterdir())


def mentions(process: psutil.Process, text: str) -> bool:
    try:
        return process.pid != os.getpid() and text in " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
