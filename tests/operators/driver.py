"""Runs the worker in a rank, notices how it ends, and starts it anew behind the entry that ended it.

Results are JSON, one line a task: ``{"task", "counts", "failures": [[phase, kind, first sample, text, samples]], …}``.
A run that is broken off goes on where it was, since the worker leaves out what the file holds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.operators.selection import Selection
from tests.proxy_runtime.rank.launcher import Launcher

WORKER = Path(__file__).parent / "worker.py"
_POISONED = 9
_POLL_S = 0.05
_STARTUP_DEADLINE_S = 300.0


class Stuck(RuntimeError):
    """The worker does not even start."""


def run(
    launcher: Launcher,
    selection: Selection,
    results: Path,
    *,
    silence_s: float = 120.0,
    log: Callable[[str], None] = print,
) -> None:
    """Runs all tasks of `selection` that `results` does not hold.

    Args:
        silence_s: a step that takes longer than this is a hang.
    """
    while True:
        progress = results.with_suffix(".progress")
        progress.unlink(missing_ok=True)
        before = _lines(results)
        how = _attempt(launcher, selection, results, progress, silence_s)
        if how is None:
            progress.unlink(missing_ok=True)
            return
        at = _last_step(progress)
        if at is None:
            raise Stuck(f"the worker ended before its first task: {how}")
        _, task, phase, sample = at
        if _holds(results, task):
            if how == "poison" and _lines(results) > before:
                log(f"{task}: the channel was unusable behind it; started anew")
                continue
            raise Stuck(f"the worker ended between tasks: {how}")
        log(f"{task}: {how} in {phase}, sample {sample}; started anew behind it")
        kind, _, text = how.partition(": ")
        record = {"task": task, "counts": {}, "failures": [[phase, kind, int(sample), text, 1]], "cpu_errors": 0}
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _attempt(launcher: Launcher, selection: Selection, results: Path, progress: Path, silence_s: float) -> str | None:
    """One life of the worker; how it ended, or None if all is done."""
    output = results.with_suffix(".log")
    with launcher.start(WORKER, selection.text(), str(results), str(progress), output=output) as job:
        (rank,), (proxy,) = job.ranks, job.proxies
        step, since, limit = None, time.monotonic(), _STARTUP_DEADLINE_S
        while (code := rank.poll()) is None:
            time.sleep(_POLL_S)
            now = _last_step(progress)
            if now != step:
                step, since, limit = now, time.monotonic(), silence_s
            if proxy.poll() is not None:
                return f"proxy crash: exit code {proxy.returncode}"
            if time.monotonic() - since > limit:
                rank.send_signal(signal.SIGABRT)  # faulthandler writes where it is
                _wait(rank)
                return f"hang: nothing for {limit:g} s"
        if code == 0:
            return None
        if code == _POISONED:
            return "poison"
        return f"rank crash: exit code {code}: {_tail(output)}"


def _wait(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()


def _last_step(progress: Path) -> tuple[str, ...] | None:
    try:
        fields = tuple(progress.read_text().split("\n")[0].split("\t"))
    except FileNotFoundError:
        return None
    return fields if len(fields) == 4 else None


def _lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def _holds(results: Path, task: str) -> bool:
    return results.exists() and any(json.loads(line)["task"] == task for line in results.read_text().splitlines())


def _tail(output: Path) -> str:
    with output.open("rb") as file:
        file.seek(max(0, os.path.getsize(output) - 300))
        return " ".join(file.read().decode(errors="replace").split())
