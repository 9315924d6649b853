"""Resizes that make no sense, and resizes in the middle of which somebody dies: refused or called off in a sentence."""

from __future__ import annotations

import random
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass

import psutil
import pytest

from model.control import JobView
from model.job_state import JobPhase
from proxy_runtime.process import proc
from tests.fleet.harness import ERGO, LocalFleet
from tests.fleet.sequences import BUSY, training
from tests.fleet.torture import Torture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

OF_THE_JOB = tuple(f"{whose} {what}" for whose in ("source's", "target's") for what in ("proxy", "shim"))
VICTIMS = (*OF_THE_JOB, "rank", "source's agent", "target's agent", "infra.job_worker", "infra.cluster_worker")
NEWS = re.compile(r"ergo: (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC  |the job waits: )")
RECOVERED = ("The job goes on from its newest checkpoint by itself", "The job is being recovered")
MOMENTS = ("asked", "made ready", "resizing", "restoring")
KEPT = ("source's shim", "proxy", "rank", "source's agent", "infra.job_worker")
KEPT_MOMENTS = ("asked", "made ready", "resizing")


@dataclass
class Resize:
    """One resize of a job that runs, with somebody killed in it."""

    fleet: LocalFleet
    job: str
    draw: random.Random

    def __post_init__(self) -> None:
        self.torture = Torture(self.fleet, self.fleet.directory, lambda *_: {})
        self.known: set[int] = set()
        """The job's processes when the resize was asked for."""

    def begin(self, width: int) -> subprocess.Popen[str]:
        self.known = {one.pid for what in ("shim", "proxy", "rank") for one in self.torture.of_job(self.job, what)}
        command = [*ERGO, "resize", self.job, "--devices", str(width), "--wait"]
        return subprocess.Popen(
            command, env=self.fleet.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def strike(self, victim: str, moment: str, asked: subprocess.Popen[str], before: JobView) -> bool:
        """Kills one, at the moment that there is one; False where the answer came first."""

        def found() -> list[psutil.Process]:
            view = self.fleet.show(self.job)
            reached = {
                "asked": (view.decisions, view.checkpoints) != (before.decisions, before.checkpoints),
                "made ready": any(self.of("shim", newer=True)),
                "resizing": view.phase is JobPhase.RESIZING,
                "restoring": view.phase is JobPhase.RESIZING and any(self.of("rank", newer=True)),
            }
            return self.find(victim, view) if reached[moment] else []

        there = self.fleet.until(
            lambda: asked.poll() is not None or found(), f"there is a {victim} when it is {moment}"
        )
        if not isinstance(there, list):
            return False
        with suppress(psutil.NoSuchProcess):
            self.draw.choice(there).kill()
        return True

    def of(self, what: str, *, newer: bool) -> list[psutil.Process]:
        """Processes of the width that is asked for, or of the one before. A shim may be of both."""
        there = self.torture.of_job(self.job, what)
        if what == "shim" and newer:
            proxies = {one.pid for one in self.of("proxy", newer=True)}
            return [one for one in there if one.pid not in self.known or proxies & {*proc.descendants(one.pid)}]
        return [one for one in there if (one.pid not in self.known) is newer]

    def find(self, victim: str, view: JobView) -> list[psutil.Process]:
        """Those of whom one is to die."""
        whose, _, what = victim.partition(" ")
        if what == "agent":
            here = {device.node.name for device in view.placement}
            names = sorted(here) if whose == "source's" else ["node-1", "node-2"]
            return self.fleet.processes(f"infra.node_agent --name {self.draw.choice(names)}")
        if what:
            return self.of(what, newer=whose == "target's")
        return self.torture.of_job(self.job, victim) if victim in ("rank", "proxy") else self.fleet.processes(victim)


def answers(told: str) -> list[str]:
    """What a command with `--wait` has answered, without what it has told meanwhile of what happens to the job."""
    return [line for line in told.strip().splitlines() if not NEWS.match(line)]


def test_whoever_dies_in_the_middle_the_job_runs_on_with_its_bits(fleet, tmp_path):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    job_of = training(tmp_path, "--clip")
    job = job_of.submit(fleet, tmp_path / "mortal", "--checkpoint-every", "20")
    cases = [(victim, draw.choice(("made ready", "restoring"))) for victim in VICTIMS if victim.startswith("target")]
    cases += [(victim, draw.choice(MOMENTS)) for victim in VICTIMS if not victim.startswith("target")]
    cases.append(("target's proxy", "made ready"))
    draw.shuffle(cases)
    resize = Resize(fleet, job, draw)
    go_through(resize, cases, (1, 2, 4))
    job_of.require_right(fleet, job, job_of.untouched(tmp_path / "alone"))
    resize.torture.require_clean(job)


def test_whoever_dies_while_processes_are_kept(fleet, tmp_path):
    """The same of a job whose two ranks are on one node, at either width."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    job_of = training(tmp_path, "--clip", ranks=2)
    job = job_of.submit(fleet, tmp_path / "kept", "--checkpoint-every", "20")
    cases = [(victim, draw.choice(KEPT_MOMENTS)) for victim in KEPT]
    cases += [("rank", "made ready"), ("proxy", "made ready"), ("proxy", "resizing")]
    draw.shuffle(cases)
    resize = Resize(fleet, job, draw)
    go_through(resize, cases, (1, 2))
    job_of.require_right(fleet, job, job_of.untouched(tmp_path / "alone"))
    resize.torture.require_clean(job)


def go_through(resize: Resize, cases: list[tuple[str, str]], widths: tuple[int, ...]) -> None:
    """One resize for each case: done, or called off with a sentence, or the job is recovered."""
    fleet, job, draw = resize.fleet, resize.job, resize.draw
    for victim, moment in cases:
        view = fleet.until_phase(job, JobPhase.RUNNING)
        fleet.until_step(job, fleet.step(job) + draw.randint(1, 4))
        view = fleet.until_phase(job, JobPhase.RUNNING)
        width = draw.choice([one for one in widths if one != view.width])
        if moment == "restoring" and view.width != max(widths):  # else no rank may have to change its node
            width = max(widths)
        told, killed = BUSY[0], False
        while not killed and any(words in told for words in BUSY):  # with a checkpoint of its own
            asked = resize.begin(width)
            killed = resize.strike(victim, moment, asked, view)
            told, _ = asked.communicate(timeout=600)
        if any(words in told for words in RECOVERED):  # it has said so before it begins
            fleet.until(lambda before=view: fleet.show(job).recoveries > before.recoveries, "it is recovered")
        fleet.until_phase(job, JobPhase.RUNNING)
        fleet.until_step(job, fleet.step(job) + 3)  # only where all of it lives
        after = fleet.until_phase(job, JobPhase.RUNNING)
        recovered = after.recoveries - view.recoveries
        what = f"{view.width} -> {width}, {moment}, {victim if killed else 'nobody'} killed"
        print(f"{what}: {told.strip()} (on {after.width}, {recovered} recovered)")
        assert "Traceback" not in told and len(answers(told)) == 1, told
        if asked.returncode == 0:
            assert after.width == width or recovered
        elif not recovered:
            assert (after.width, after.phase) == (view.width, JobPhase.RUNNING), "it runs on as it did"
            assert told.endswith("as before. Ask again.\n"), told
        assert recovered <= 1


def test_what_makes_no_sense_is_refused_in_a_sentence(fleet, tmp_path):
    job_of = training(tmp_path)
    job = job_of.submit(fleet, tmp_path / "sense", "--checkpoint-every", "0")
    fleet.until_step(job, 2)
    for width, words in (
        ("0", "Invalid value for '--devices'"),
        ("-2", "Invalid value for '--devices'"),
        ("3", "possible are 1, 2, 4"),
        ("8", "A job of 4 ranks cannot use 8 devices"),
        ("4", "runs on 4 devices already"),
        (str(10**30), "Invalid value for '--devices'"),
        ("2.5", "Invalid value for '--devices'"),
        ("", "Invalid value for '--devices'"),
        ("two", "Invalid value for '--devices'"),
    ):
        done = fleet.run("resize", job, "--devices", width, "--wait")
        assert done.returncode and words in done.stderr and "Traceback" not in done.stderr, done.stderr
    done = fleet.run("resize", "nobody-a1b2c3", "--devices", "2")
    assert done.returncode == 1 and "There is no job nobody-a1b2c3" in done.stderr, done.stderr
    fleet.ergo("preempt", job, "--wait")
    done = fleet.run("resize", job, "--devices", "2")
    assert done.returncode == 1 and "The job is suspended: only a running one can be resized" in done.stderr
    assert "`ergo resume` lets it go on" in done.stderr
    fleet.ergo("resume", job, "--wait")
    first, *others = [Resize(fleet, job, random.Random(0)).begin(width) for width in (2, 1)]
    told = [process.communicate(timeout=600)[0] for process in (first, *others)]
    codes = [process.returncode for process in (first, *others)]
    assert sorted(map(bool, codes)) == [False, True], told
    refused = next(text for text, code in zip(told, codes, strict=True) if code)
    assert any(words in refused for words in ("asked to resize already", "The job is resizing", "to run on"))
    width = fleet.show(job).width
    assert width in (1, 2)
    checkpoint = subprocess.Popen([*ERGO, "checkpoint", job, "--wait"], env=fleet.env, text=True)
    fleet.run("resize", job, "--devices", "4", "--wait")  # before, in or after it
    assert checkpoint.wait(600) == 0
    view = job_of.require_right(fleet, job, job_of.untouched(tmp_path / "alone"))
    assert view.recoveries == 0
    done = fleet.run("resize", job, "--devices", "2")
    assert done.returncode and "has ended (completed)" in done.stderr, done.stderr
