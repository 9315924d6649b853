"""The proof of elasticity: a job that is resized at random ends with every number of the untouched one.

    python -m tests.elastic.proof [KIND...] [--seed N] [--resizes N]

For each kind of `kinds.KINDS` the script runs twice under `tests/elastic/observed.py`: on a device for each rank, and
through a sequence of widths at random moments, all drawn from the printed seed: some when a step is done, the others
wherever the ranks are. Compared are, per rank: every loss, sha256 of weights and buffers, of optimizer state, of the
generators of host and device, all that it printed, and every file of the job directory. Exit code 1 where any differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.splicing import widths
from model.units import counted
from proxy_runtime.errors import ErgoError
from proxy_runtime.job import Job
from proxy_runtime.shim.spec import CutReport, CutRequest, contiguous_placement
from tests.elastic.kinds import KINDS, Kind
from tests.end_to_end.harness import Script, running

COMPARED = {name for kind in KINDS.values() if kind.shares_less_than for name in (kind.name, kind.shares_less_than)}
OBSERVED = Path(__file__).with_name("observed.py")
DEADLINE_S = 300.0
_LAST = 0.6  # of a job's steps, after which no resize is asked for at random
_MEASURED = 0.64, 0.84  # of a job's steps: where what ranks share is compared with what those of another kind do
_APART = 4  # steps between two resizes, at least
_PAUSE_S = 0.02  # within each step of the job that is resized


@dataclass(frozen=True, slots=True)
class Resize:
    """One of a plan: to this width when all ranks have done the step, or `anywhere` after it.

    Attributes:
        restored: the processes go on from a checkpoint, as in a fleet; else they stay.
        awaited: the ranks wait for it at the end of that step, so that none of them is further.
    """

    step: int
    width: int
    anywhere: bool
    restored: bool
    awaited: bool = False


@dataclass(slots=True)
class Finding:
    """What came of a kind.

    Attributes:
        different: what the two runs do not agree on: both values, as text.
        problems: sentences about runs that did not do what they were to.
        cuts: of the run that was resized, as they were taken.
        placements: after each, for every rank the index of its device.
        seconds: that both runs took.
    """

    kind: Kind
    seed: int
    plan: list[Resize]
    different: dict[str, tuple[str, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    cuts: list[CutReport] = field(default_factory=list)
    placements: list[tuple[int, ...]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        return not self.different and not self.problems

    @property
    def sharing(self) -> dict[str, int]:
        """Counters of all stretches in which ranks shared a device, summed; sizes: the largest of them."""
        found: dict[str, int] = {}
        for cut in self.cuts:
            for name, count in cut.sharing.items():
                found[name] = max(found.get(name, 0), count) if "_bytes" in name else found.get(name, 0) + count
        return found

    @property
    def shared(self) -> float:
        """Which part of the ranks' calls another rank's run has served, of those on shared devices."""
        found = self.sharing
        return found.get("shared", 0) / max(1, found.get("shared", 0) + found.get("executed", 0))

    @property
    def incomparable(self) -> str:
        """Why `shared_in_steps` says nothing; empty where it does."""
        measured = self.cuts[-2:]
        if [set(cut.steps) for cut in measured] != [{resize.step} for resize in self.plan[-2:]]:
            return f"it was not cut at the end of steps {', '.join(str(resize.step) for resize in self.plan[-2:])}"
        if fired := measured[-1].sharing.get("timeouts", 0):
            return f"{counted(fired, 'time limit')} of waiting fired, and ended what its ranks did together"
        return ""

    @property
    def shared_in_steps(self) -> float:
        """As `shared`, but of whole steps, and of as many in each kind: see `planned`.

        What is shared is the last part of each step. Of a stretch of some steps that begins and ends anywhere, a part
        more or less makes a greater difference than there is between two kinds.
        """
        found = self.cuts[-1].sharing
        return found["shared"] / (found["shared"] + found["executed"])

    @property
    def row(self) -> str:
        found = self.sharing
        path = "->".join(map(str, (self.kind.script.ranks, *(each.width for each in self.plan))))
        numbers = " ".join(f"{name} {found.get(name, 0)}" for name in ("executed", "copies", "timeouts", "verified"))
        return (
            f"{self.kind.name:28} world {self.kind.script.ranks} {path:14} {'equal' if self.equal else 'DIFFERENT':9} "
            f"shared {self.shared:6.1%} {numbers} {self.seconds:.0f} s"
        )


def planned(kind: Kind, seed: int, resizes: int = 0) -> list[Resize]:
    """Widths that visit all there are and end at the first one, at random steps; by default no more than that takes.

    A kind that is compared with another is on one device for some whole steps more: see `Finding.shared_in_steps`.
    """
    draw, world = random.Random(f"{seed} {kind.name}"), kind.script.ranks
    all_widths = widths(world)
    resizes = resizes or len(all_widths)
    while True:
        path = [world]
        for _ in range(resizes):
            path.append(draw.choice([width for width in all_widths if width != path[-1]]))
        if path[-1] == world and set(path) == set(all_widths):
            break
    spare = int(kind.steps * _LAST) - _APART * resizes
    steps = [2 + _APART * n + each for n, each in enumerate(sorted(draw.choices(range(max(1, spare)), k=resizes)))]
    first = draw.random() < 0.5  # in turns: each kind knows both ways
    plan = [
        Resize(step, width, draw.random() < 0.5, restored=(n % 2 == 0) == first)
        for n, (step, width) in enumerate(zip(steps, path[1:], strict=True))
    ]
    if kind.name in COMPARED:
        begin, end = (
            int(kind.steps * part) // 2 * 2 for part in _MEASURED
        )  # even: an optimizer of its own has stepped
        plan += [Resize(begin, 1, False, False, awaited=True), Resize(end, world, False, False, awaited=True)]
    return plan


def prove(kind: Kind, seed: int, scratch: Path, resizes: int = 0) -> Finding:
    """Runs a kind untouched and resized, and compares."""
    began = time.monotonic()
    finding = Finding(kind, seed, planned(kind, seed, resizes))
    untouched = _run(kind, scratch / "untouched", [], finding)
    resized = _run(kind, scratch / "resized", finding.plan, finding)
    for name in sorted(untouched.keys() | resized.keys()):
        one, other = untouched.get(name, "nothing"), resized.get(name, "nothing")
        if one != other:
            finding.different[name] = one[:200], other[:200]
    if not any(name.endswith("generators/device") for name in untouched):
        finding.problems.append("the script was not observed to its end")
    if finding.sharing.get("mismatches"):
        finding.problems.append(f"{finding.sharing['mismatches']} shared results were not what each rank computes")
    wanted = kind.on_half
    for resize, found in zip(finding.plan, finding.placements, strict=False):
        if not wanted or len(set(found)) != len(set(wanted)):
            continue
        # Within a step some of the replicas may have updated their weights: then they have nothing in common.
        if found != wanted and not (resize.anywhere and found == contiguous_placement(len(found), len(set(found)))):
            finding.problems.append(f"its ranks were put on devices {found}, not {wanted}")
    finding.seconds = time.monotonic() - began
    return finding


def _run(kind: Kind, directory: Path, plan: list[Resize], finding: Finding) -> dict[str, str]:
    script = kind.script
    observed = dataclasses.replace(
        script,
        path=OBSERVED,
        arguments=(str(script.path), *script.arguments),
        env=(*script.env, *_pace(kind, directory, plan)),
    )
    with running(observed, directory) as job:
        for each in plan:
            report = _resize(job, kind, each)
            if report is not None:
                finding.cuts.append(report)
                finding.placements.append(tuple(job.status().get("placement", ())))
            _gate(directory, each).touch()
            if report is None or report.outcome != "moved":
                why = "the job had ended" if report is None else f"{report.outcome}: {report.error}"
                finding.problems.append(f"it did not go on on {each.width} devices at step {each.step}: {why}")
                for later in plan:
                    _gate(directory, later).touch()
                break
        result = job.wait(DEADLINE_S)
        logs = [job.logs(rank) for rank in range(script.ranks)]
        if result is None or result.code:
            finding.problems.append(result.sentence if result else f"it did not end within {DEADLINE_S:.0f} s")
            finding.problems += [log[-1500:] for log in logs]
        elif not all(re.search(kind.shows, log, re.MULTILINE) for log in logs):
            finding.problems.append(f"not every rank has shown '{kind.shows}'")
    return evidence(observed, directory, logs)


def _pace(kind: Kind, directory: Path, plan: list[Resize]) -> Iterator[tuple[str, str]]:
    """Has ranks wait so that one resize is over before the next or the end is due, however slow the machine is."""
    if plan and kind.steps:
        until = [*(later.step - 2 for later in plan[1:]), kind.steps - 4]
        until = [each.step if each.awaited else step for each, step in zip(plan, until, strict=True)]
        gates = [f"{step}:{_gate(directory, each)}" for step, each in zip(until, plan, strict=True)]
        yield "OBSERVED_GATES", ",".join(gates)
        yield "OBSERVED_PAUSE", str(_PAUSE_S)


def _gate(directory: Path, resize: Resize) -> Path:
    return directory.with_name(f"{directory.name}-step-{resize.step}-is-over")


def _resize(job: Job, kind: Kind, wanted: Resize) -> CutReport | None:
    try:
        while not job.status().get("attached"):
            time.sleep(0.01)
        request = CutRequest(devices=wanted.width, keep_processes=not wanted.restored)
        if kind.steps and not wanted.anywhere:
            return job.cut(dataclasses.replace(request, at_step=wanted.step))
        if kind.steps:
            while min(job.status()["step"]) < wanted.step:
                time.sleep(0.002)
        else:
            time.sleep(wanted.step / 50)
        return job.cut(request)
    except (ErgoError, KeyError):
        return None


def evidence(script: Script, directory: Path, logs: list[str]) -> dict[str, str]:
    """Everything that a run has computed, by name."""
    found: dict[str, str] = {}
    for path in sorted(each for each in directory.rglob("*") if each.is_file()):
        name = str(path.relative_to(directory))
        if name.startswith("observed-rank"):
            found.update(_flat(name, json.loads(path.read_text())))
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    found.update({f"output of rank {rank}, line {n}": line for rank, log in enumerate(logs) for n, line in _lines(log)})
    return found


def _lines(log: str) -> list[tuple[int, str]]:
    return list(enumerate(re.sub(r"\bW\d{4} [\d:.]+ (\d+ )?", "W ", log).splitlines(), 1))  # torch's have time and pid


def _flat(name: str, value: Any) -> dict[str, str]:
    if isinstance(value, dict):
        return {key: text for part, each in value.items() for key, text in _flat(f"{name}/{part}", each).items()}
    if isinstance(value, list):
        return {key: text for n, each in enumerate(value) for key, text in _flat(f"{name}/{n}", each).items()}
    return {name: str(value)}


def sharing_in_order(findings: dict[str, Finding]) -> list[str]:
    """Sentences about kinds whose ranks diverge and yet share as much as those that do not."""
    problems: list[str] = []
    for finding in findings.values():
        other = findings.get(finding.kind.shares_less_than)
        if other is None or not (finding.equal and other.equal):
            continue
        if why := finding.incomparable or other.incomparable:
            problems.append(f"{finding.kind.name} cannot be compared with {other.kind.name}: {why}.")
        elif not (mine := finding.shared_in_steps) < (others := other.shared_in_steps):
            problems.append(
                f"{finding.kind.name}: its ranks diverge, and {mine:.2%} of the calls were shared, of "
                f"{other.kind.name} {others:.2%}."
            )
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--resizes", type=int, default=0, help="of each job; default: to every width")
    args = parser.parse_args()
    if unknown := [name for name in args.kinds if name not in KINDS]:
        parser.error(f"no kind {', '.join(unknown)}")
    print(f"seed {args.seed}", flush=True)
    findings: dict[str, Finding] = {}
    for name in args.kinds or KINDS:
        with tempfile.TemporaryDirectory() as scratch:
            findings[name] = finding = prove(KINDS[name], args.seed, Path(scratch), args.resizes)
        print(finding.row, *_details(finding), sep="\n    ", flush=True)
    wrong = sharing_in_order(findings)
    print(*wrong, sep="\n")
    return 0 if not wrong and all(finding.equal for finding in findings.values()) else 1


def _details(finding: Finding) -> list[str]:
    steps = [f"{'/'.join(map(str, sorted(set(cut.steps))))}" for cut in finding.cuts]
    lines = [f"at steps {', '.join(steps)}"] if steps else []
    if finding.kind.name in COMPARED:
        lines.append(finding.incomparable or f"{finding.shared_in_steps:.2%} shared in whole steps")
    lines += [f"{name}: {one} / {other}" for name, (one, other) in list(finding.different.items())[:12]]
    return lines + finding.problems


if __name__ == "__main__":
    sys.exit(main())
