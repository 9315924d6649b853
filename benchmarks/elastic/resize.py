"""`elastic.resize_downtime`: how long an example of four ranks stands still when its devices become two, one, four."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import BenchmarkError, Condition, Context, Figure, benchmark
from benchmarks.machine import ROOT
from benchmarks.runs import environment
from proxy_runtime.job import Job, JobOptions
from proxy_runtime.shim.spec import CutReport, CutRequest

_RANKS = 4
WIDTHS = (_RANKS, 2, 1, _RANKS)
_DEADLINE_S = 180.0
_EVERY = {"char_gpt": 40, "digits_cnn": 60, "mlp_sgd": 200}  # steps, some seconds: the next resize is asked for ahead


def _measure(example: str) -> Callable[[Context], Iterator[Figure]]:
    def measure(context: Context) -> Iterator[Figure]:
        found: dict[str, list[tuple[float, CutReport]]] = defaultdict(list)
        for _ in range(context.repeat):
            context.say(f"{example}: {' -> '.join(map(str, WIDTHS))} devices")
            gaps = _play(example, context.directory())
            for (before, after), gap in zip(pairwise(WIDTHS), gaps, strict=True):
                found[f"{before}_to_{after}"].append(gap)
        for name, each in found.items():
            yield Figure(
                f"elastic.resize_downtime.{example}.{name}",
                "s",
                [gap for gap, _ in each],
                Condition("<", 2),
                details={"parts_ms": [report.ms for _, report in each]},
            )

    measure.__doc__ = f"Through the runtime alone: {example}."
    return measure


def _play(example: str, cwd: Path) -> list[tuple[float, CutReport]]:
    """One run; for each resize the gap between two steps as rank 0 saw it, in s, and what the runtime tells."""
    every = _EVERY[example]
    arguments = ("--steps", str(every * len(WIDTHS)), "--sync-every", "1", "--log-every", "0", "--time-steps")
    job = Job.start(
        JobOptions(
            argv=(sys.executable, str(ROOT / "examples" / f"{example}.py"), *arguments, "--out", "out"),
            world_size=_RANKS,
            devices=_RANKS,
            cwd=cwd,
            env=environment(),
        )
    )
    try:
        reports = [_resize(job, width, at_step=every * (n + 1)) for n, width in enumerate(WIDTHS[1:])]
        result = job.wait(_DEADLINE_S)
        if result is None or result.code != 0:
            raise BenchmarkError(f"{example} has not ended well: {result.sentence if result else 'it still runs'}")
    finally:
        if not job.ended:
            job.kill()
            job.wait(30)
    timing = json.loads((cwd / "out" / "losses-rank0.json").read_text())["step_ms"]
    return assigned(timing, reports)


def _resize(job: Job, width: int, at_step: int) -> CutReport:
    report = job.cut(CutRequest(at_step=at_step, devices=width, step_deadline_s=_DEADLINE_S, keep_processes=True))
    if report.outcome != "moved":
        raise BenchmarkError(f"A job did not go on on {width} devices ({report.outcome}): {report.error}")
    return report


def assigned(timing: dict[str, Any], reports: list[CutReport]) -> list[tuple[float, CutReport]]:
    """The longest steps are those with a resize in them, the longer the longer the runtime was at it."""
    gaps = [(longest - timing["median"]) / 1e3 for longest in timing["longest"][: len(reports)]]
    by_length = sorted(range(len(reports)), key=lambda index: -reports[index].ms["downtime"])
    found = dict(zip(by_length, gaps, strict=True))
    for index, report in enumerate(reports):
        if found[index] < report.ms["downtime"] / 2e3:
            told = report.ms["downtime"] / 1e3
            raise BenchmarkError(
                f"The script's clock saw a gap of {found[index]:.2f} s, the runtime tells {told:.2f} s."
            )
    return [(found[index], report) for index, report in enumerate(reports)]


for _example in _EVERY:
    benchmark(f"elastic.resize_downtime.{_example}")(_measure(_example))
