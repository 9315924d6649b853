"""A real local fleet for tests: `ergo up` in a directory of its own, jobs as a user submits them, processes killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from temporalio.client import Client
from temporalio.service import RPCError

from events.consumer import EventReader, Once
from events.types import Event
from infra.settings import Settings
from model.control import JobView
from model.ids import NodeId
from model.job_state import JobPhase
from model.names import Query
from model.records import JobOnNode

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ERGO = [sys.executable, "-m", "cli.main"]
DEADLINE_S = 180.0
GENTLE = ("--steps", "400", "--sync-every", "1", "--log-every", "50")


class Everything(Once):
    """What is out of date counts too: numbers of events are without gaps only with it."""

    def admit(self, event: Event) -> bool:
        return True


class LocalFleet:
    """A fleet that is up."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.env = {**os.environ, "ERGO_FLEET_DIR": str(directory), "PYTHONPATH": str(ROOT)}
        self._loop = asyncio.new_event_loop()
        self._client: Client | None = None
        self.settings = Settings(fleet_dir=directory)
        self.store = None

    # ------------------------------------------------------------------ the command line

    def up(self, *options: str) -> None:
        self.ergo("up", *options)
        self.settings = Settings(fleet_dir=self.directory)
        self.store = self.settings.fleet_store()

    def down(self) -> None:
        self._loop.close()
        self.ergo("down", "--purge")
        left = self.processes()
        assert not left, f"processes were left behind: {[(p.pid, ' '.join(p.cmdline())) for p in left]}"

    def ergo(self, *arguments: str, cwd: Path | None = None, code: int = 0) -> str:
        done = self.run(*arguments, cwd=cwd)
        assert done.returncode == code, f"ergo {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def run(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*ERGO, *arguments], env=self.env, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S
        )

    def submit(self, directory: Path, *arguments: str) -> str:
        return self.ergo("submit", *arguments, cwd=directory).strip()

    # ------------------------------------------------------------------ looking at it

    def client(self) -> Client:
        if self._client is None:
            self._client = self._loop.run_until_complete(self.settings.connect_temporal())
        return self._client

    def wait(self, coroutine):
        return self._loop.run_until_complete(coroutine)

    def show(self, job: str) -> JobView:
        return self.wait(self.client().get_workflow_handle(job).query(Query.SHOW, result_type=JobView))

    def part(self, job: str) -> JobOnNode | None:
        """What the nodes have told of the job with their last leases: the newest epoch, the lowest step."""
        parts = [part for record in self.store.nodes() for part in record.jobs if part.job == job]
        return min(parts, key=lambda part: (-part.epoch, part.step), default=None)

    def step(self, job: str) -> int:
        part = self.part(job)
        return int(part.step) if part else 0

    def until(self, condition: Callable[[], object], what: str, seconds: float = DEADLINE_S) -> object:
        limit = time.monotonic() + seconds
        while True:
            try:
                found = condition()
            except Exception as error:  # the server may be the one that was killed
                found, what = None, re.sub(r"( \(last error.*)?$", f" (last error {error})", what, count=1)
            if found:
                return found
            if time.monotonic() > limit:
                raise AssertionError(f"{what} did not happen within {seconds} s\n{self.story()}")
            time.sleep(0.1)

    def until_phase(self, job: str, *phases: JobPhase) -> JobView:
        def there() -> JobView | None:
            view = self.show(job)
            assert not (view.phase.ended and view.phase not in phases), f"{view}"
            return view if view.phase in phases else None

        return self.until(there, f"{job} is {' or '.join(phases)}")  # type: ignore[return-value]

    def until_step(self, job: str, step: int) -> None:
        """Waits for a step, on however slow a machine, as long as steps or operations bring it nearer."""
        while (at := self._standing(job))[0] < step:
            assert not any(isinstance(what, JobPhase) and what.ended for what in at), f"{job} has ended before {step}"
            self.until(lambda at=at: self._standing(job) != at, f"{job} is not at {at} any more, on its way to {step}")

    def _standing(self, job: str) -> tuple[object, ...]:
        try:
            view = self.show(job)
        except RPCError:  # the server may be the one that was killed
            return (self.step(job),)
        return self.step(job), view.phase, view.epoch

    def events(self, job: str) -> list[Event]:
        """All that were published, in the order of their ids, those that readers drop included."""
        reader = EventReader(self.settings.kafka(), _once=Everything())
        found = {record.event.id: record.event for record in reader.read() if record.event.subject == job}
        return sorted(found.values(), key=lambda event: (event.id.generation, event.id.seq))

    def story(self) -> str:
        """The ends of all logs, for a failed test."""
        parts = []
        for path in sorted((self.directory / "logs").glob("*.log")):
            lines = [line for line in path.read_text(errors="replace").splitlines() if "error" in line.lower()]
            parts.append(f"--- {path.name}\n" + "\n".join(lines[-5:]))
        return "\n".join(parts)

    # ------------------------------------------------------------------ killing it

    def processes(self, module: str = "") -> list[psutil.Process]:
        """Processes of this fleet, those whose command line has `module` in it."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                command = " ".join(process.cmdline())
                mine = str(self.directory) in command or process.environ().get("ERGO_FLEET_DIR") == str(self.directory)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if mine and module in command:
                found.append(process)
        return found

    def kill(self, module: str) -> None:
        """SIGKILL to every process of the fleet whose command line has `module` in it."""
        victims = self.processes(module)
        assert victims, f"no process of {module}"
        for process in victims:
            process.send_signal(signal.SIGKILL)

    def node_of(self, job: str) -> NodeId:
        return self.show(job).placement[0].node


def job_directory(path: Path, *scripts: str) -> Path:
    """A directory with examples in it, as a user has one."""
    path.mkdir(parents=True)
    for script in (*scripts, "_report.py"):
        shutil.copy(EXAMPLES / script, path)
    return path


def submit_gpt(fleet: LocalFleet, tmp_path: Path, name: str, options: Sequence[str], script: Sequence[str]) -> str:
    """Submits the character GPT from a directory of its own, with these options of `ergo submit` and of the script."""
    directory = job_directory(tmp_path / name, "char_gpt.py")
    return fleet.submit(directory, *options, "--name", name, "char_gpt.py", *script, "--out", "results")


def require_right(
    fleet: LocalFleet,
    job: str,
    tmp_path: Path,
    untouched: Callable[..., dict[str, str]],
    ranks: int,
    script: Sequence[str],
) -> JobView:
    """The GPT job completes with the bits of the untouched run, and all of its events are told."""
    view = fleet.until_phase(job, JobPhase.COMPLETED)
    fleet.ergo("download", job, "results", str(tmp_path / "results"))
    assert digests(tmp_path / "results", ranks) == untouched("char_gpt.py", ranks, *script)
    fleet.until(lambda: fleet.show(job).unpublished_events == 0, "all events are published")
    require_whole(fleet.events(job))
    return view


def digests(directory: Path, ranks: int) -> dict[str, str]:
    """What an example computed: digests of all losses of each rank, and of the weights as each rank has them."""
    found: dict[str, str] = {}
    for rank in range(ranks):
        result = json.loads((directory / f"losses-rank{rank}.json").read_text())
        found[f"losses {rank}"] = result["losses_sha256"]
        found[f"weights {rank}"] = result["weights_sha256"]
        found[f"steps {rank}"] = str(len(result["losses"]))
    return found


def require_whole(events: list[Event]) -> None:
    """No event is lost or doubled, in no generation, and no epoch was started twice."""
    seen: dict[tuple[str, int], list[int]] = {}
    for event in events:
        seen.setdefault((event.id.first_execution_run, int(event.id.generation)), []).append(int(event.id.seq))
    for key, numbers in seen.items():
        assert sorted(set(numbers)) == list(range(1, max(numbers) + 1)), f"generation {key} has events {numbers}"
    # A run that is set back to before a start tells the start again; what runs has an epoch that nobody had.
    changes = [event for event in events if event.type.startswith("ergosphere.job.phase")]
    starts = [e.epoch for e in changes if (e.data.before, e.data.after) == ("starting", "running")]
    assert len(starts) == len(set(starts)), f"epochs were started twice: {starts}"
    assert events[-1].data.after.ended, f"the last event is {events[-1]}"
