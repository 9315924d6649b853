"""What a real fleet promises: preempted means gone, terminated ends the ranks, a node that comes back harms nobody."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass, field

import psutil
import pytest

from events.consumer import EventReader
from model.ids import JobId
from model.job_state import JobPhase
from tests.fleet.harness import LocalFleet, job_directory, require_right, submit_gpt
from tests.fleet.torture import GPT, SHORT, Torture

pytestmark = pytest.mark.slow

RANKS = 4
SUBMIT = ("--tier", "basic", "--ranks", str(RANKS), "--checkpoint-every", "4")
TERMINATED_S = 20.0
"""Within how many seconds the ranks of a terminated workflow have ended."""


@pytest.fixture
def torture(fleet, tmp_path, untouched):
    return Torture(fleet, tmp_path / "work", untouched)


def submit(fleet, tmp_path, name, *options):
    return submit_gpt(fleet, tmp_path, name, options or SUBMIT, GPT)


@dataclass
class Witness:
    """Looks at the processes of a job at the moment when Kafka says that it is suspended."""

    fleet: LocalFleet
    job: str
    known: dict[int, psutil.Process] = field(default_factory=dict)
    found: list[list[str]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Witness:
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._learn, self._read)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(30)

    def _learn(self) -> None:
        """Every process that the job has ever had, whatever becomes of its parents."""
        while not self.over.wait(0.3):
            for shim in self.fleet.processes("proxy_runtime.shim"):
                try:
                    if f"/{self.job}-e" in " ".join(shim.cmdline()):
                        for process in (shim, *shim.children(recursive=True)):
                            self.known.setdefault(process.pid, process)
                except psutil.NoSuchProcess:
                    continue

    def _read(self) -> None:
        for record in EventReader(self.fleet.settings.kafka()).follow(lambda: not self.over.is_set()):
            event = record.event if record is not None else None
            if event is None or event.subject != self.job or not event.type.startswith("ergosphere.job"):
                continue
            if event.data.after is JobPhase.SUSPENDED:
                self.found.append([f"{process.pid}" for process in self.known.values() if _lives(process)])


def _lives(process: psutil.Process) -> bool:
    """Whether it may hold memory: one that has ended and was not waited for yet holds none."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_preempted_means_that_processes_and_device_memory_are_gone(fleet, tmp_path, untouched):
    job = submit(fleet, tmp_path, "witnessed")
    with Witness(fleet, job) as witness:
        fleet.until_step(job, 10)
        fleet.ergo("preempt", job, "--wait")
        fleet.until(lambda: len(witness.found) == 1, "the event of the person's preemption is read")
        fleet.ergo("resume", job, "--wait")
        fleet.until_step(job, 30)
        place = job_directory(tmp_path / "premium", "char_gpt.py")
        other = fleet.submit(
            place, "--tier", "premium", "--ranks", "4", "--name", "premium", "char_gpt.py", *SHORT, "--out", "results"
        )
        fleet.until_phase(other, JobPhase.COMPLETED)
        fleet.until(lambda: len(witness.found) == 2, "the event of the scheduler's preemption is read")
        require_right(fleet, job, tmp_path, untouched, RANKS, GPT)
    assert len(witness.known) >= 3 * 2 * 5, "shims, zygotes, proxies, inits and ranks of three epochs on two nodes"
    assert witness.found == [[], []]


def test_a_workflow_that_is_terminated_takes_its_ranks_along(fleet, tmp_path, torture):
    job = submit(fleet, tmp_path, "terminated")
    fleet.until_step(job, 5)
    done = torture.temporal("workflow", "terminate", "--workflow-id", job, "--reason", "test")
    assert done.returncode == 0, done.stderr
    fleet.until(lambda: not torture.of_job(job, "shim"), "no process of the job is left", TERMINATED_S)
    fleet.until(lambda: torture.free_devices() == 4, "all devices are free again", 30)
    fleet.until(lambda: any(event.data.after.ended for event in job_events(fleet, job)), "the end is told", 30)
    row = next(line for line in fleet.ergo("ps", "-a").splitlines() if line.startswith(job))
    assert "cancelled" in row


def job_events(fleet, job):
    return [event for event in fleet.events(job) if event.type.startswith("ergosphere.job")]


def test_a_job_of_a_drained_node_moves(fleet, tmp_path, untouched):
    """And what the scheduler has counted of it follows from its events."""
    job = submit(fleet, tmp_path, "drained", "--tier", "standard", "--ranks", "2")
    fleet.until_step(job, 10)
    node = fleet.node_of(job).name
    try:
        fleet.ergo("node", "drain", node, "--wait")
        view = fleet.show(job)
        assert (view.moves, view.preemptions) == (1, 0) and node not in {one.node.name for one in view.placement}
        said = f"Standard job {job} moves off {node}, which is being emptied: it will have 2 devices on "
        assert said in fleet.ergo("explain", job)
    finally:
        fleet.ergo("node", "uncordon", node)
    require_right(fleet, job, tmp_path, untouched, 2, GPT)
    fleet.until(lambda: "completed" in fleet.ergo("ps", "-a"), "it has ended")
    live = fleet.ergo("sla", "report", "--json")
    assert fleet.ergo("sla", "report", "--from-events", "--json") == live and '"standard"' in live


def test_one_of_two_shims_is_killed(fleet, tmp_path, torture, untouched):
    job = submit(fleet, tmp_path, "split")
    fleet.until(lambda: fleet.show(job).checkpoints, "a checkpoint is committed")
    torture.of_job(job, "shim")[0].kill()
    view = require_right(fleet, job, tmp_path, untouched, RANKS, GPT)
    assert view.recoveries == 1
    torture.require_clean(job)


def test_an_agent_that_was_stopped_for_longer_than_its_lease(fleet, tmp_path, torture, untouched):
    job = submit(fleet, tmp_path, "overslept", "--tier", "basic", "--ranks", "2", "--checkpoint-every", "4")
    fleet.until(lambda: fleet.show(job).checkpoints, "a checkpoint is committed")
    node = fleet.node_of(job)
    (agent,) = fleet.processes(f"infra.node_agent --name {node.name}")
    agent.send_signal(signal.SIGSTOP)
    try:
        old = torture.of_job(job, "shim")
        fleet.until(lambda: fleet.show(job).epoch > 1 and fleet.show(job).placement, "it is placed elsewhere", 60)
        assert fleet.node_of(job).name != node.name
        assert all(_lives(shim) for shim in old), "nobody could end them"
        time.sleep(1.0)  # both epochs run at the same time
    finally:
        agent.send_signal(signal.SIGCONT)
    fleet.until(lambda: not any(_lives(shim) for shim in old), "the old part is ended", 30)
    view = require_right(fleet, job, tmp_path, untouched, 2, GPT)
    assert view.recoveries == 1
    torture.require_clean(JobId(job))
