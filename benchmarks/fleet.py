"""The fleet of `make demo`: how long it takes, how long a moved job stands still, how much memory it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import BenchmarkError, Condition, Context, Figure, benchmark

ROOT = Path(__file__).resolve().parents[1]


@benchmark("fleet.demo")
def demo(context: Context) -> Iterator[Figure]:
    """Plays the demo `repeat` times; a run whose bits differ is no measurement."""
    runs = [_play(context.directory() / "report.json") for _ in range(context.repeat)]
    moves = [run["migration"] for run in runs]
    yield Figure("fleet.demo.seconds", "s", [run["seconds"] for run in runs], Condition("<=", 240.0))
    yield Figure("fleet.demo.up", "s", [run["up_s"] for run in runs])
    yield Figure(
        "fleet.demo.migration_downtime",
        "s",
        [move["down_ms"] / 1e3 for move in moves],
        Condition("<", 4.0),
        details={"parts_ms": [move["parts_ms"] for move in moves]},
    )
    yield Figure(
        "fleet.idle_memory", "MB", [run["idle_bytes"] / 1e6 for run in runs], Condition("<=", 2 * 1024**3 / 1e6)
    )
    yield Figure(
        "fleet.demo.peak_memory", "MB", [run["peak_bytes"] / 1e6 for run in runs], Condition("<=", 8 * 1024**3 / 1e6)
    )


def _play(report: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.demo", "--leave", "--json-report", str(report)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        raise BenchmarkError(f"the demo ended with code {done.returncode}.", remedy="Run `make demo` and look.")
    return json.loads(report.read_text())
