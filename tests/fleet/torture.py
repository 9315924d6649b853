"""Scenarios at random: operations on a job, with parts of the fleet killed or stopped while they are under way.

    python -m tests.fleet.torture DIR SEED ...    a fleet of its own in DIR; one that has failed is left up

A seed names a scenario: the same operations and faults, after the same pauses. What the machine does meanwhile is not
in it, so that a seed that has failed once is tried a few times.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from model.job_state import JobPhase
from tests.fleet.harness import ERGO, LocalFleet, digests, job_directory, require_whole

STEPS = 300
GPT = ("--steps", str(STEPS), "--d-model", "64", "--layers", "2", "--sync-every", "1", "--log-every", "0")
SHORT = ("--steps", "20", "--d-model", "64", "--layers", "2", "--sync-every", "1", "--log-every", "0")
LONGEST_PAUSE_S = 3.0
STOPPED_S = 15.0
SCENARIO_S = 400.0

Untouched = Callable[..., Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Blow:
    """One operation, and a fault so many seconds after it was asked for."""

    operation: str
    fault: str
    pause_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """What one job of `ranks` ranks goes through."""

    seed: int
    ranks: int
    blows: tuple[Blow, ...]

    def __str__(self) -> str:
        blows = ", ".join(f"{blow.operation} x {blow.fault} at {blow.pause_s:.1f} s" for blow in self.blows)
        return f"seed {self.seed}, {self.ranks} ranks: {blows}"


PARTS = {
    "job worker": "infra.job_worker",
    "cluster worker": "infra.cluster_worker",
    "kafka": "kafka.Kafka",
    "temporal": "start-dev",
}
AT_THE_JOB = ("shim", "rank", "proxy", "zygote")
AT_A_NODE = ("agent here", "agent there", "node", "agent stopped")
OF_THE_WORKFLOW = ("reset", "renew")
FAULTS = (*PARTS, *AT_THE_JOB, *AT_A_NODE, *OF_THE_WORKFLOW)


def scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    dice = random.Random(seed)
    ranks = dice.choice((2, 4))
    operations = ["preempt", "checkpoint", "preempted by another", "end", "resize", "resize"]
    operations += ["migrate"] * 2 if ranks == 2 else []
    blows = tuple(
        Blow(dice.choice(operations), dice.choice(FAULTS), round(dice.uniform(0.0, LONGEST_PAUSE_S), 1))
        for _ in range(dice.choice((1, 2, 2, 3)))
    )
    return Scenario(seed, ranks, blows)


@dataclass
class Torture:
    """Runs scenarios on a fleet of two nodes with two devices each."""

    fleet: LocalFleet
    directory: Path
    untouched: Untouched
    say: Callable[[str], None] = print
    _told: list[str] = field(default_factory=list)

    def run(self, plan: Scenario, name: str = "") -> str:
        """Plays it and checks everything that is promised; returns the job's id."""
        fleet = self.fleet
        name = name or f"tortured-{plan.seed}"
        place = job_directory(self.directory / name, "char_gpt.py")
        options = ("--tier", "basic", "--ranks", str(plan.ranks), "--checkpoint-every", "4")
        job = fleet.submit(place, *options, "--name", name, "char_gpt.py", *GPT, "--out", "results")
        asked: list[subprocess.Popen[str]] = []
        others: list[str] = []
        fleet.until_step(job, 5)
        dice = random.Random(f"victims of {plan.seed}")
        for blow in plan.blows:
            if fleet.show(job).phase.ended:
                break
            self.note(f"{job}: {fleet.show(job).phase} at step {fleet.step(job)}: {blow}")
            if blow.operation == "end":
                with suppress(AssertionError):
                    fleet.until(
                        lambda: fleet.step(job) >= STEPS - 30 or not fleet.show(job).placement, "the end is near"
                    )
            elif blow.operation == "preempted by another":
                others.append(self._other(plan, len(others)))
            else:
                asked.append(self._ask(job, blow.operation, dice))
            time.sleep(blow.pause_s)
            self.strike(job, blow.fault, dice)
            time.sleep(dice.uniform(1.0, 6.0))
            self._let_go_on(job, asked)
        self.until_completed(job)
        for process in asked:
            told, _ = process.communicate(timeout=60)
            assert "Traceback" not in told, told
        for other in others:
            self.until_completed(other)
        self.require_right(job, plan.ranks)
        self.require_clean(job, *others)
        self.require_trace(job)
        return job

    def note(self, line: str) -> None:
        """Says it, with the time."""
        self.say(f"{time.strftime('%H:%M:%S')} {line}")

    # ------------------------------------------------------------------ operations

    def _ask(self, job: str, operation: str, dice: random.Random) -> subprocess.Popen[str]:
        command = [operation, job, "--wait"]
        if operation == "resize":
            view = self.fleet.show(job)
            widths = [width for width in (1, 2, 4) if width <= view.ranks and width != view.width]
            command += ["--devices", str(dice.choice(widths))]
        if operation == "migrate":
            here = self.fleet.show(job).placement
            name = "node-2" if here and here[0].node.name == "node-1" else "node-1"
            command += ["--to", name]
        return subprocess.Popen(
            [*ERGO, *command], env=self.fleet.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def _other(self, plan: Scenario, number: int) -> str:
        """A job that takes all devices for a short while."""
        name = f"premium-{plan.seed}-{number}-{time.time_ns() % 10**6}"
        place = job_directory(self.directory / name, "char_gpt.py")
        options = ("--tier", "premium", "--ranks", "4", "--name", name)
        return self.fleet.submit(place, *options, "char_gpt.py", *SHORT, "--out", "results")

    def _let_go_on(self, job: str, asked: list[subprocess.Popen[str]]) -> None:
        """A job that a person holds is let go on, as soon as it stands."""
        limit = time.monotonic() + 90
        while time.monotonic() < limit:
            with suppress(Exception):
                view = self.fleet.show(job)
                if view.phase is JobPhase.SUSPENDED and view.held:
                    self.fleet.run("resume", job)
                    return
                if not view.held and all(process.poll() is not None for process in asked):
                    return
                if view.phase.ended:
                    return
            time.sleep(0.2)

    def until_completed(self, job: str) -> None:
        """Waits for the end; a hold that comes back (a reset tells old requests again) is ended as a person would."""

        def ended() -> bool:
            view = self.fleet.show(job)
            if view.held and view.phase is JobPhase.SUSPENDED:
                self.fleet.run("resume", job)
            assert not view.phase.ended or view.phase is JobPhase.COMPLETED, f"{view}"
            return view.phase is JobPhase.COMPLETED

        self.fleet.until(ended, f"{job} has completed", SCENARIO_S)

    # ------------------------------------------------------------------ faults

    def strike(self, job: str, fault: str, dice: random.Random) -> None:
        """Does what `fault` says, now, to whatever it finds."""
        fleet = self.fleet
        if fault in PARTS:
            self.end(fleet.processes(PARTS[fault])[:1])
        elif fault in AT_THE_JOB:
            found = self.of_job(job, fault)
            self.end([dice.choice(found)] if found else [])
        elif fault == "reset":
            self.reset(job, dice)
        elif fault == "renew":
            with suppress(Exception):
                fleet.wait(fleet.client().get_workflow_handle(job).signal("renew"))
        else:
            self._at_a_node(job, fault, dice)

    def _at_a_node(self, job: str, fault: str, dice: random.Random) -> None:
        with suppress(Exception):
            placement = self.fleet.show(job).placement
            here = {device.node.name for device in placement}
            name = dice.choice(sorted(here) or ["node-1", "node-2"])
            if fault == "agent there":
                name = "node-2" if name == "node-1" else "node-1"
            agents = self.fleet.processes(f"infra.node_agent --name {name}")
            if fault == "node":
                self.end([*agents, *self.fleet.processes(f"nodes/{name}/"), *self.of_node(name)])
            elif fault == "agent stopped":
                for agent in agents:
                    agent.send_signal(signal.SIGSTOP)
                self.note(f"  stopped the agent of {name} for {STOPPED_S} s")
                time.sleep(STOPPED_S)
                for agent in agents:
                    with suppress(psutil.NoSuchProcess):
                        agent.send_signal(signal.SIGCONT)
            else:
                self.end(agents)

    def end(self, processes: list[psutil.Process]) -> None:
        """SIGKILL to all of them, at once."""
        killed = []
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                what = " ".join(process.cmdline()[:4])
                process.kill()
                killed.append(f"{process.pid} {what[-40:]}")
        self.note(f"  killed {killed[:2]}{f' and {len(killed) - 2} more' if len(killed) > 2 else ''}")

    def of_job(self, job: str, kind: str) -> list[psutil.Process]:
        """The living processes of a job's parts on all nodes."""
        shims = [p for p in self.fleet.processes("proxy_runtime.shim") if f"/{job}-e" in " ".join(p.cmdline())]
        if kind == "shim":
            return shims
        found: list[psutil.Process] = []
        for shim in shims:
            with suppress(psutil.NoSuchProcess):
                zygotes = [p for p in shim.children() if "zygote" in " ".join(p.cmdline())]
                if kind == "zygote":
                    found += zygotes
                elif kind == "proxy":
                    found += [p for zygote in zygotes for p in zygote.children()]
                else:
                    keepers = [p for p in shim.children(recursive=True) if "--keeper" in p.cmdline()]
                    found += [p for keeper in keepers for p in keeper.children()]
        return found

    def of_node(self, name: str) -> list[psutil.Process]:
        """Everything under the shims of a node."""
        found: list[psutil.Process] = []
        for shim in self.fleet.processes("proxy_runtime.shim"):
            with suppress(psutil.NoSuchProcess):
                if f"nodes/{name}/" in " ".join(shim.cmdline()):
                    found += shim.children(recursive=True)
        return found

    def temporal(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command line of Temporal itself."""
        file = self.fleet.settings.fleet_file()
        assert file is not None
        tool = Path(sys.executable).parent / "temporal"
        return subprocess.run(
            [str(tool), *arguments, "--address", file.temporal_address], capture_output=True, text=True, timeout=60
        )

    def reset(self, job: str, dice: random.Random) -> None:
        """The workflow goes back to one of its completed tasks."""
        from temporalio.api.enums.v1 import EventType

        async def tasks() -> list[int]:
            history = await self.fleet.client().get_workflow_handle(job).fetch_history()
            return [e.event_id for e in history.events if e.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED]

        with suppress(Exception):
            event = dice.choice(self.fleet.wait(tasks()))
            done = self.temporal(
                "workflow", "reset", "--workflow-id", job, "--event-id", str(event), "--reason", "torture"
            )
            self.note(f"  reset to event {event}: {done.returncode} {done.stderr.strip()[:200]}")

    # ------------------------------------------------------------------ what is promised

    def require_right(self, job: str, ranks: int) -> None:
        """The bits, the events, and what `ps` and `show` tell."""
        fleet = self.fleet
        fleet.until(lambda: fleet.show(job).unpublished_events == 0, "all events are published")
        results = self.directory / f"results-{job}"
        fleet.ergo("download", job, "results", str(results))
        assert digests(results, ranks) == self.untouched("char_gpt.py", ranks, *GPT), "the bits are others"
        require_whole(fleet.events(job))
        assert "completed" in next(line for line in fleet.ergo("ps", "-a").splitlines() if line.startswith(job))

    def require_clean(self, *jobs: str) -> None:
        """No process of a job that is over, and every device may be had again."""
        for job in jobs:
            self.fleet.until(lambda job=job: not self.of_job(job, "shim"), f"no shim of {job} is left", 60)
        self.fleet.until(lambda: self.free_devices() == 4, "all devices are free again", 60)

    def require_trace(self, job: str) -> None:
        """The job can be followed by its id through the logs of all that have had to do with it."""
        directory = self.fleet.directory
        logs = [*(directory / "logs").glob("*.log"), *(directory / "nodes").glob("*/parts.log")]
        told: set[str] = set()
        for line in (
            line for log in logs for line in log.read_bytes().splitlines() if f'"job":"{job}"'.encode() in line
        ):
            told.add(json.loads(line)["process"])
        wanted = {"cli", "job-worker", "cluster-worker", "node-agent", "shim", "device-proxy"}
        assert wanted <= told, f"the logs of {wanted - told} do not name {job}"

    def free_devices(self) -> int:
        """Devices that `ergo fleet` calls free."""
        told = json.loads(self.fleet.ergo("fleet", "--json"))
        alive = [node for node in told["nodes"] if node["state"] == "alive"]
        return sum(not device["jobs"] for node in alive for device in node["devices"])


def main() -> int:
    """Plays scenarios until one fails."""
    from tests.end_to_end.harness import Script
    from tests.end_to_end.harness import run as run_alone
    from tests.fleet.harness import EXAMPLES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("directory", type=Path)
    parser.add_argument("seeds", type=int, nargs="+")
    given = parser.parse_args()
    alone: dict[int, dict[str, str]] = {}

    def untouched(script: str, ranks: int, *arguments: str) -> dict[str, str]:
        if ranks not in alone:
            directory = given.directory / f"alone-{ranks}-{STEPS}"
            if not (directory / "results").exists():
                directory.mkdir(parents=True, exist_ok=True)
                outcome = run_alone(Script(EXAMPLES / script, (*arguments, "--out", "results"), ranks), directory)
                assert outcome.result.code == 0, outcome.logs
            alone[ranks] = digests(directory / "results", ranks)
        return alone[ranks]

    fleet = LocalFleet(given.directory / "fleet")
    fleet.up("--nodes", "2", "--devices", "2")
    torture = Torture(
        fleet, given.directory / f"work-{time.time_ns()}", untouched, lambda line: print(line, flush=True)
    )
    for seed in given.seeds:
        plan = scenario(seed)
        torture.note(f"== {plan}")
        began = time.monotonic()
        torture.run(plan)
        torture.note(f"== seed {seed} right after {time.monotonic() - began:.0f} s")
    fleet.down()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
