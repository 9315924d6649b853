"""`elastic.resize_downtime.fleet`: the same through a fleet: `ergo resize` on a running job of four ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.elastic.resize import WIDTHS
from benchmarks.harness import BenchmarkError, Condition, Context, Figure, benchmark
from benchmarks.machine import ROOT
from model.units import counted

_STEPS_BETWEEN = 5
_DEADLINE_S = 300.0


@benchmark("elastic.resize_downtime.fleet.char_gpt")
def char_gpt(context: Context) -> Iterator[Figure]:
    """How long no rank ran, as `ergo show` tells; the scheduler's and the workflow's part of it included.

    On two nodes of two devices: from four devices to two and back, two of the ranks change their node.
    """
    yield from _resizes(context, "fleet", "char_gpt", nodes=2)


@benchmark("elastic.resize_downtime.fleet.digits_cnn")
def digits_cnn(context: Context) -> Iterator[Figure]:
    """The same of ranks with two loader processes each."""
    yield from _resizes(context, "fleet", "digits_cnn", nodes=2)


@benchmark("elastic.resize_downtime.node.char_gpt")
def char_gpt_on_a_node(context: Context) -> Iterator[Figure]:
    """The same on one node of four devices: processes are kept."""
    yield from _resizes(context, "node", "char_gpt", nodes=1)


@benchmark("elastic.resize_downtime.node.digits_cnn")
def digits_cnn_on_a_node(context: Context) -> Iterator[Figure]:
    """The same of ranks with two loader processes each."""
    yield from _resizes(context, "node", "digits_cnn", nodes=1)


@benchmark("elastic.resize_downtime.node.mlp_sgd")
def mlp_sgd_on_a_node(context: Context) -> Iterator[Figure]:
    """The same of the smallest example."""
    yield from _resizes(context, "node", "mlp_sgd", nodes=1)


def _resizes(context: Context, where: str, example: str, nodes: int) -> Iterator[Figure]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    directory = context.directory()
    try:
        _ergo(directory, "up", "--nodes", str(nodes), "--devices", str(WIDTHS[0] // nodes))
        for number in range(context.repeat):
            context.say(f"{example} on {counted(nodes, 'node')}: {' -> '.join(map(str, WIDTHS))} devices")
            for (before, after), change in zip(pairwise(WIDTHS), _play(directory, example, number), strict=True):
                found[f"{before}_to_{after}"].append(change)
    finally:
        _ergo(directory, "down", "--purge")
    for name, changes in found.items():
        yield Figure(
            f"elastic.resize_downtime.{where}.{example}.{name}",
            "s",
            [change["down_ms"] / 1e3 for change in changes],
            Condition("<", 2),
            details={"parts_ms": [change["parts_ms"] for change in changes]},
        )


def _play(directory: Path, example: str, number: int) -> list[dict[str, Any]]:
    """A job that is resized after some steps, and then cancelled; for each resize what is told of it."""
    cwd = directory / f"job-{number}"
    cwd.mkdir()
    for script in (f"{example}.py", "_report.py"):
        shutil.copy(ROOT / "examples" / script, cwd)
    options = ("--tier", "basic", "--ranks", str(WIDTHS[0]), "--checkpoint-every", "0", "--name", f"resized-{number}")
    script = (f"{example}.py", "--steps", "100000", "--sync-every", "1", "--log-every", "0")
    job = _ergo(directory, "submit", *options, *script, cwd=cwd).strip()
    try:
        changes: list[dict[str, Any]] = []
        for width in WIDTHS[1:]:
            _until_steps(directory, job)
            _ergo(directory, "resize", job, "--devices", str(width), "--wait")
            told = [each for each in _show(directory, job)["transitions"] if each["down_ms"] is not None]
            if len(told) != len(changes) + 1 or len(told[-1]["devices"]) != width:
                raise BenchmarkError(f"{job} was not resized to {width} devices, or something else happened: {told}")
            changes.append(told[-1])
        return changes
    finally:
        _ergo(directory, "cancel", job, "--wait")


def _until_steps(directory: Path, job: str) -> None:
    """It runs, and has made some steps where it runs now."""
    until, first = time.monotonic() + _DEADLINE_S, None
    while time.monotonic() < until:
        view = _show(directory, job)
        if view["phase"] == "running":
            step = int(view["step"])
            first = step if first is None else first
            if step >= first + _STEPS_BETWEEN:
                return
        time.sleep(0.5)
    raise BenchmarkError(f"{job} has made no {_STEPS_BETWEEN} steps within {_DEADLINE_S:.0f} s.")


def _show(directory: Path, job: str) -> dict[str, Any]:
    return json.loads(_ergo(directory, "show", job, "--json"))


def _ergo(fleet: Path, *arguments: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        env={**os.environ, "ERGO_FLEET_DIR": str(fleet / "fleet"), "PYTHONPATH": str(ROOT)},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
    )
    if done.returncode != 0:
        raise BenchmarkError(f"`ergo {arguments[0]}` ended with code {done.returncode}: {done.stderr[-500:]}")
    return done.stdout
