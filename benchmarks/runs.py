"""Runs a script natively or under Ergosphere, and reads what it and `ergo run` report.

Both sides run the same file with the same arguments, one thread a device and the same switches of torch, and tell
their own step times; nothing about a run is measured from outside.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import BenchmarkError
from benchmarks.machine import ROOT

_DIGESTS = re.compile(r"rank (\d+) losses sha256 ([0-9a-f]{64}) weights sha256 ([0-9a-f]{64})")
_TIMES = re.compile(r"rank (\d+) step ms (\{.*\})")
_LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Wall time of a step as a rank saw it, in ms: over blocks of steps that each end by waiting for the device."""

    median: float
    lower_quartile: float
    upper_quartile: float
    longest: tuple[float, ...]
    blocks: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run printed: digests (losses, weights) and step times by rank."""

    digests: dict[int, tuple[str, str]]
    times: dict[int, StepTimes]


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut of `ergo run`: its outcome (``moved``, ``checkpointed``, ``called-off``, …) and its parts in ms."""

    outcome: str
    error: str
    ms: dict[str, float]

    @property
    def stop_agree_ms(self) -> float:
        """From the request to all proxies stopped and agreed."""
        return self.ms["stop"] + self.ms["agree"]


@dataclass(frozen=True, slots=True)
class Report:
    """What `ergo run --json-report` wrote, as far as benchmarks need it."""

    cuts: tuple[Cut, ...]
    rss_mb: tuple[float, ...]

    @classmethod
    def read(cls, path: Path) -> Report:
        """Reads a report.

        Raises:
            BenchmarkError: there is none, or it lacks something.
        """
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            cuts = tuple(_cut(cut) for cut in content["cuts"])
            return cls(cuts=cuts, rss_mb=tuple(float(size) for size in content["rss_mb"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchmarkError(f"The report of `ergo run` cannot be read: {error!r}.") from error


def run_native(script: str, arguments: Sequence[str], *, ranks: int, cwd: Path, deadline_s: float = 300) -> Outcome:
    """Runs a script of this repository by torchrun on the CPU, one thread a rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    output = run_command([sys.executable, *launcher, str(ROOT / script), *arguments], cwd, deadline_s)
    return parse_output(output, ranks)


def run_ergo(
    script: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    cwd: Path,
    options: Sequence[str] = (),
    deadline_s: float = 600,
    reports_digests: bool = True,
) -> tuple[Outcome, Report]:
    """Runs a script of this repository by `ergo run`, one CPU accelerator with one thread a rank.

    `options` are further ones of `ergo run`, for example cuts. `reports_digests` says whether the script ends as
    the examples do.
    """
    report = cwd / "report.json"
    places = ["--nproc", str(ranks), "--devices", str(ranks), "--threads", "1", "--json-report", str(report)]
    output = run_command([*ergo_command(), "run", *places, *options, str(ROOT / script), *arguments], cwd, deadline_s)
    outcome = parse_output(output, ranks) if reports_digests else Outcome({}, {})
    return outcome, Report.read(report)


def ergo_command() -> list[str]:
    """The `ergo` command of this source tree."""
    launcher = Path(sys.executable).with_name("ergo")
    if not launcher.is_file():
        raise BenchmarkError("There is no `ergo` beside this Python.", remedy="Run the benchmarks by `make bench`.")
    return [str(launcher)]


def parse_output(output: str, ranks: int) -> Outcome:
    """Finds the evidence of every rank in the output of a run.

    Raises:
        BenchmarkError: a rank printed none.
    """
    digests = {int(m[1]): (m[2], m[3]) for m in _DIGESTS.finditer(output)}
    missing = sorted(set(range(ranks)) - set(digests))
    if missing:
        raise BenchmarkError(f"Ranks {missing} did not print their digests; the run ended with: {_tail(output)}")
    return Outcome(digests, {int(m[1]): _step_times(m[2]) for m in _TIMES.finditer(output)})


def _cut(content: dict[str, Any]) -> Cut:
    return Cut(
        outcome=str(content.get("outcome", "")),
        error=str(content.get("error", "")),
        ms={name: float(value) for name, value in content["ms"].items()},
    )


def _step_times(text: str) -> StepTimes:
    content = json.loads(text)
    return StepTimes(
        median=content["median"],
        lower_quartile=content["lower_quartile"],
        upper_quartile=content["upper_quartile"],
        longest=tuple(content["longest"]),
        blocks=content["blocks"],
    )


def environment() -> dict[str, str]:
    """What native and proxied runs share: a rank under Ergosphere has the same settings."""
    foreign = ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    return environment | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_NATIVE_JIT": "1", "PYTHONHASHSEED": "0"}


def run_command(command: Sequence[str], cwd: Path, deadline_s: float) -> str:
    """Runs a command in a session of its own and returns what it wrote; nothing of it outlives the call."""
    log = cwd / "output.txt"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(deadline_s)
        except BaseException as error:
            _end(process)
            if isinstance(error, subprocess.TimeoutExpired):
                said = _tail(log.read_text(errors="replace"))
                raise BenchmarkError(f"A run was not done after {deadline_s:g} s; it said last: {said}") from error
            raise
    output = log.read_text(errors="replace")
    if code != 0:
        raise BenchmarkError(f"A run ended with exit code {code}: {_tail(output)}")
    return output


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks the session to end, then makes it. torchrun gives its ranks, which have their own sessions, 30 s."""
    for number, patience_s in ((signal.SIGTERM, 45), (signal.SIGKILL, 15)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _tail(output: str) -> str:
    return "\n  ".join(["", *output.splitlines()[-_LAST_LINES:]])
