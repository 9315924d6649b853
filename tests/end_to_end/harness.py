"""Runs scripts under the runtime with cuts at random moments, and compares what they computed."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from proxy_runtime.errors import ErgoError
from proxy_runtime.job import Job, JobOptions, JobResult
from proxy_runtime.shim import aftermath
from proxy_runtime.shim.spec import CutReport, CutRequest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
JOBS = ROOT / "tests" / "jobs"
DEADLINE_S = 240.0


@dataclass(frozen=True)
class Script:
    """A script and how to run it. `name` is unique among the tests of a session.

    With a `launcher` (a command beside the interpreter and its arguments) the script is a job of one tree, in which
    that starts the ranks; `python` where the script does so itself.
    """

    path: Path
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    devices: int = 0
    env: tuple[tuple[str, str], ...] = ()
    launcher: tuple[str, ...] = ()

    @property
    def tree(self) -> bool:
        """It starts its own ranks, or a launcher does."""
        return bool(self.launcher)

    @property
    def logs(self) -> int:
        return 1 if self.tree else self.ranks

    @property
    def width(self) -> int:
        return self.devices or self.ranks

    def __str__(self) -> str:
        how = "".join(f"{word.rpartition('/')[2]}-" for word in self.launcher)
        return f"{how}{self.path.stem}-{self.ranks}on{self.width}-{'_'.join(self.arguments) or 'plain'}"


@dataclass(frozen=True)
class CutPlan:
    """Cuts at moments drawn from a seed. `width` of each move, and whether processes stay, too when `resize` is set."""

    seed: int
    count: int = 3
    longest_pause_s: float = 0.8
    live_share: float = 0.2
    resize: bool = False


@dataclass
class Outcome:
    """What a run left behind."""

    result: JobResult
    evidence: dict[str, str]
    logs: list[str]
    cuts: list[CutReport] = field(default_factory=list)
    directory: Path = Path()


@contextmanager
def running(script: Script, directory: Path, **options: object) -> Iterator[Job]:
    """A started job; whatever happens inside, nothing of it stays behind."""
    directory.mkdir(parents=True, exist_ok=True)
    job = Job.start(job_options(script, directory, **options))
    try:
        yield job
    finally:
        if not job.ended:
            try:
                job.end()
            except ErgoError:
                pass  # it ended by itself in this moment
        job.wait(30)
        aftermath.clean(job.client.layout)


def job_options(script: Script, directory: Path, **options: object) -> JobOptions:
    return JobOptions(
        argv=(*_command(script), str(script.path), *script.arguments),
        world_size=script.ranks,
        pack="node" if script.tree else "rank",
        devices=script.width,
        cwd=directory,
        env={**os.environ, **dict(script.env)},
        keep_run=True,
        **options,  # type: ignore[arg-type]
    )


def _command(script: Script) -> tuple[str, ...]:
    if not script.tree or script.launcher[0] == "python":
        return (sys.executable, *script.launcher[1:])
    return (str(Path(sys.executable).parent / script.launcher[0]), *script.launcher[1:])


def run(script: Script, directory: Path, plan: CutPlan | None = None, **options: object) -> Outcome:
    """Runs a script to its end, with the cuts of a plan, and collects what it computed."""
    with running(script, directory, **options) as job:
        cutter = threading.Thread(target=_follow, args=(job, script, plan), daemon=True)
        if plan is not None:
            print(f"{script}: cuts from seed {plan.seed}")
            cutter.start()
        result = job.wait(DEADLINE_S)
        if result is None:
            raise AssertionError(f"{script} did not end within {DEADLINE_S} s; status {job.status()}")
        if plan is not None:
            cutter.join(10)
        logs = [job.logs(rank) for rank in range(script.logs)]
        return Outcome(result, evidence(script, directory, logs), logs, list(job.cuts), directory)


def _follow(job: Job, script: Script, plan: CutPlan) -> None:
    draw = random.Random(plan.seed)
    _until_running(job)
    for index in range(plan.count):
        # The first one soon, and scripts train for seconds: a machine must not be done before it.
        limit = time.monotonic() + draw.random() * (plan.longest_pause_s if index else 0.1)
        while time.monotonic() < limit and not job.ended:
            time.sleep(0.005)
        live = draw.random() < plan.live_share
        width = draw.randint(1, script.ranks) if plan.resize else None
        if script.tree and index == 0:
            _until_training(job)
        try:
            kept = not live and width not in (None, job.status().get("width")) and draw.random() < 0.5
            job.cut(CutRequest(move=not live, devices=None if live else width, keep_processes=kept))
        except ErgoError:
            return  # the job has ended


def _until_training(job: Job) -> None:
    """Until a process of the tree has done a step: launchers take their time."""
    while not job.ended:
        try:
            if max(job.status().get("step", [0])) > 0:
                return
        except ErgoError:
            return
        time.sleep(0.01)


def _until_running(job: Job) -> None:
    """Until every rank's interposer has shaken hands: before that there is nothing of torch to cut."""
    while not job.ended:
        try:
            if job.status().get("attached"):
                return
        except ErgoError:
            return
        time.sleep(0.01)


def evidence(script: Script, directory: Path, logs: list[str]) -> dict[str, str]:
    """Digests of everything a run computed: of losses and weights (examples) or of all values seen (jobs)."""
    found: dict[str, str] = {}
    for path in sorted(directory.rglob("losses-rank*.json")):
        data = json.loads(path.read_text())
        found[f"{path.stem} losses"] = data["losses_sha256"]
        found[f"{path.stem} weights"] = data["weights_sha256"]
        found[f"{path.stem} steps"] = str(len(data["losses"]))
    for rank, log in enumerate(logs):
        for match in re.finditer(r"^RESULT ([0-9a-f]{64}) rank (\d+)$", log, re.MULTILINE):
            found[f"result of rank {match[2]}"] = match[1]
        for index, match in enumerate(re.finditer(r"sha256 ([0-9a-f]{64})", log)):
            found[f"digest {index} in the log of rank {rank}"] = match[1]
    return found


def require_equal(untouched: Outcome, cut: Outcome, *, cuts: int) -> None:
    """Asserts that both runs ended well, that the second was really cut, and that every digest is equal."""
    for outcome in (untouched, cut):
        assert outcome.result.code == 0, f"{outcome.result.sentence}\n{tails(outcome)}"
        assert outcome.evidence, f"no evidence in the output\n{tails(outcome)}"
    failed = [report.error for report in cut.cuts if report.outcome == "called-off"]
    assert not failed, f"cuts were called off: {failed}\n{tails(cut)}"
    done = [report for report in cut.cuts if report.outcome in ("moved", "checkpointed")]
    assert len(done) >= cuts, f"only {len(done)} of {cuts} cuts hit the job while it ran"
    different = {
        name: (untouched.evidence.get(name), cut.evidence.get(name))
        for name in untouched.evidence.keys() | cut.evidence.keys()
        if untouched.evidence.get(name) != cut.evidence.get(name)
    }
    assert not different, f"{different}\n{[report.to_json() for report in cut.cuts]}"


def tails(outcome: Outcome) -> str:
    return "\n".join(f"--- rank {rank}\n{log[-1500:]}" for rank, log in enumerate(outcome.logs))
