"""Operations on a running job of the fleet, one after another, in an order drawn from a seed."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from model.control import JobView
from model.job_state import JobPhase
from tests.end_to_end.harness import Script
from tests.end_to_end.harness import run as run_alone
from tests.fleet.harness import ROOT, LocalFleet, require_whole
from tests.fleet.torture import Torture

RANKS = 4
SCRIPTS = ROOT / "tests" / "proxy_runtime" / "device" / "splice"
BUSY = ("ask again when that is done", "is asked to", "sk again when it runs", "only a running one")
"""What a job says that is not free for an operation: a checkpoint of its own, a wish of the scheduler's, a recovery."""


def drawn(draw: random.Random) -> tuple[str, ...]:
    """Every kind of operation at least once, in any order."""
    kinds = ["resize"] * 4 + ["migrate", "preempt", "checkpoint", "recovery"]
    draw.shuffle(kinds)
    return tuple(kinds)


@dataclass
class Operated:
    """A job of four ranks on a fleet of two nodes with two devices each.

    Attributes:
        done: what was done to it, for people.
        down_ms: how long no rank ran for each resize.
    """

    fleet: LocalFleet
    job: str
    draw: random.Random
    done: list[str] = field(default_factory=list)
    down_ms: list[float] = field(default_factory=list)

    def go_through(self, kinds: tuple[str, ...]) -> None:
        """One operation after another, each after some steps."""
        for kind in kinds:
            self.fleet.until_step(self.job, self.fleet.step(self.job) + self.draw.randint(1, 8))
            match kind:
                case "resize":
                    width = self.fleet.show(self.job).width
                    self.resize(self.draw.choice([one for one in (1, 2, 4) if one != width]))
                case "migrate":
                    self.migrate()
                case "preempt":
                    self._until_done("preempt", self.job, "--wait")
                    self.fleet.ergo("resume", self.job, "--wait")
                case "checkpoint":
                    self._until_done("checkpoint", self.job, "--wait")
                case _:
                    self.recovery()
            self.done.append(f"{kind} (on {self.fleet.show(self.job).width})")

    def resize(self, width: int) -> None:
        """To another width; the scheduler may have had the same idea since."""
        if self.fleet.show(self.job).width == width:
            return
        self._until_done("resize", self.job, "--devices", str(width), "--wait")
        view = self.fleet.until_phase(self.job, JobPhase.RUNNING)
        last = [change for change in view.transitions if change.down_ms is not None][-1]
        assert len(last.devices) == width and last.down_ms is not None, view
        self.down_ms.append(last.down_ms)

    def migrate(self) -> None:
        """To the other node, which takes two devices at most."""
        if self.fleet.show(self.job).width > 2:
            self.resize(self.draw.choice((1, 2)))
        here = {device.node.name for device in self.fleet.show(self.job).placement}
        other = [name for name in ("node-1", "node-2") if name not in here]
        if other:
            self._until_done("migrate", self.job, "--to", other[0], "--wait")

    def recovery(self) -> None:
        """A process of it is killed: it goes on from its newest checkpoint."""
        fleet = self.fleet
        fleet.until(lambda: fleet.show(self.job).checkpoints, "there is a checkpoint to go back to")
        before = fleet.show(self.job).recoveries
        kind = self.draw.choice(("shim", "proxy", "rank"))
        found = Torture(fleet, fleet.directory, lambda *_: {}).of_job(self.job, kind)
        self.draw.choice(found).kill()
        self.done.append(f"killed a {kind}")
        fleet.until(lambda: fleet.show(self.job).recoveries > before, f"{self.job} is recovered")
        fleet.until_phase(self.job, JobPhase.RUNNING)

    def _until_done(self, *command: str) -> None:
        """Again, where the job is busy with something of its own just then."""

        def done() -> bool:
            tried = self.fleet.run(*command)
            busy = any(sentence in tried.stderr for sentence in BUSY)
            assert not tried.returncode or busy, tried.stderr
            return not tried.returncode

        while not done():
            self.fleet.until_phase(self.job, JobPhase.RUNNING)


@dataclass(frozen=True)
class Digests:
    """A script that prints, with each rank's last line, hashes of all that the rank has computed and holds.

    Attributes:
        hurry: a file; as long as it is not there the script takes its time, so that it lasts however slow the machine.
    """

    script: str
    arguments: tuple[str, ...]
    hurry: Path
    ranks: int = RANKS

    def untouched(self, directory: Path) -> list[str]:
        """The lines of a run with no operation on it."""
        self.hurry.touch()
        outcome = run_alone(Script(SCRIPTS / self.script, self.arguments, self.ranks), directory)
        assert outcome.result.code == 0, outcome.logs
        return sorted(_digests("\n".join(outcome.logs)))

    def submit(self, fleet: LocalFleet, directory: Path, *options: str) -> str:
        """Hands it in."""
        directory.mkdir()
        shutil.copy(SCRIPTS / self.script, directory)
        ranks = ("--ranks", str(self.ranks), "--name", directory.name)
        return fleet.submit(directory, "--tier", "basic", *ranks, *options, self.script, *self.arguments)

    def require_right(self, fleet: LocalFleet, job: str, expected: list[str]) -> JobView:
        """It completes with the same lines, and all of its events are told."""
        assert len(expected) == self.ranks
        self.hurry.touch()
        view = fleet.until_phase(job, JobPhase.COMPLETED)
        found = [fleet.ergo("logs", job, "--rank", str(rank)) for rank in range(self.ranks)]
        assert sorted(_digests("\n".join(found))) == expected
        fleet.until(lambda: fleet.show(job).unpublished_events == 0, "all events are published")
        require_whole(fleet.events(job))
        return view


def training(tmp_path: Path, *options: str, ranks: int = RANKS) -> Digests:
    """A DDP job that takes its time: an MLP with batch norm and dropout."""
    hurry = tmp_path / "hurry"
    paced = ("--steps", "1500", "--pause", "1.0", "--pause-until", str(hurry))
    return Digests("train.py", (*options, *paced), hurry, ranks)


def _digests(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("rank ") and " losses " in line]
