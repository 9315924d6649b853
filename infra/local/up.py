"""Brings a local fleet up, or leaves nothing behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from infra.fleet import DETACH, STAY
from infra.fleet_file import FleetFile
from infra.local import processes
from infra.local.health import await_healthy
from infra.local.lock import FleetLock
from infra.local.prepare import Outside, UpOptions, check_directory, check_machine, make
from infra.local.status import FleetStatus
from infra.settings import STOPPING, Settings
from proxy_runtime.errors import ErgoError

DEADLINE_S = 180.0
_STOP_S = 60.0


class Progress(Protocol):
    """Who is told how far a fleet has come; any thread."""

    def parts(self, names: tuple[str, ...]) -> None:
        """These parts will be waited for."""
        ...

    def done(self, part: str, detail: str) -> None:
        """A part is healthy."""
        ...

    def say(self, text: str) -> None:
        """A sentence for people."""
        ...


@dataclass(frozen=True, slots=True)
class Up:
    """A fleet that is up; `already` where it was before the call."""

    fleet: FleetFile
    already: bool
    supervisor: int


def up(fleet_dir: Path, options: UpOptions, progress: Progress) -> Up:
    """Returns when every part is healthy and every node has registered; the fleet then lives on in the background.

    Raises:
        ErgoError: it cannot be; then no process is left, and no directory that was not there before.
    """
    with _Start(fleet_dir, options, progress) as start:
        if start.already is not None:
            return start.already
        start.run()
        return start.detach()


def up_in_foreground(fleet_dir: Path, options: UpOptions, progress: Progress, ready: Callable[[Up], None]) -> None:
    """As `up`, then calls `ready` and stays until the fleet ends or this process is told to: then it ends the fleet."""
    with _Start(fleet_dir, options, progress) as start:
        if start.already is not None:
            raise ErgoError(
                f"The fleet in {fleet_dir} is up in the background already.",
                code="fleet.running",
                remedy="Take it down first: `ergo down`.",
            )
        start.run()
        start.stay(ready)


class _Start:
    """One attempt. Leaving the `with` block before `detach` ends all that it has started."""

    def __init__(self, fleet_dir: Path, options: UpOptions, progress: Progress) -> None:
        self._dir = fleet_dir
        self._options = options
        self._progress = progress
        self._fresh = False
        self._lock: FleetLock | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._fleet: FleetFile | None = None
        self._detached = False
        self.already: Up | None = None

    def __enter__(self) -> _Start:
        try:
            self._enter()
        except BaseException:
            self._undo()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._detached:
            self._undo()
        elif self._lock is not None:
            self._lock.release()

    def _enter(self) -> None:
        outside = Outside.of()
        if not self._dir.exists():
            check_machine(self._dir, outside)
            self._dir.mkdir(parents=True)
        check_directory(self._dir)
        self._lock = FleetLock.take(self._dir)
        if self._lock is None:
            self.already = _running(self._dir, self._options)
            return
        # Only what this attempt makes may be removed again; a store without its fleet.json is still somebody's data.
        self._fresh = {path.name for path in self._dir.iterdir()} == {"lock"}
        check_machine(self._dir, outside)
        self._end_leftovers()
        settings = Settings.load(self._dir)
        self._fleet = make(settings, self._options, outside, self._progress.say)

    def run(self) -> None:
        """Starts the supervisor and waits until the fleet is healthy."""
        assert self._fleet is not None
        assert self._lock is not None
        settings = Settings.load(self._dir)
        arguments = [sys.executable, "-m", "infra.fleet", "--fleet-dir", str(self._dir)]
        started = time.time()
        with (self._dir / "logs" / "supervisor.log").open("ab") as output:
            self._supervisor = subprocess.Popen(
                arguments,
                env=processes.python_environment(self._dir),
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(self._lock.descriptor,),
            )
        alive = self._supervisor.poll
        await_healthy(
            settings,
            self._fleet,
            self._progress,
            alive=lambda: alive() is None,
            since=started,
            deadline_s=DEADLINE_S,
        )

    def detach(self) -> Up:
        """Lets the fleet outlive this process."""
        self._tell(DETACH)
        self._pipe().close()
        self._detached = True
        return self.result()

    def stay(self, ready: Callable[[Up], None]) -> None:
        """Tells that all is up, and blocks until the supervisor ends."""
        assert self._supervisor is not None
        self._tell(STAY)
        self._fresh = False  # what it stores from now on is worth keeping
        ready(self.result())
        code = self._supervisor.wait()
        raise ErgoError(
            f"The fleet has ended (its supervisor: exit code {code}).",
            code="fleet.ended",
            remedy=f"Its last words are in {self._dir / 'logs' / 'supervisor.log'}.",
        )

    def result(self) -> Up:
        """What is up."""
        assert self._fleet is not None
        assert self._supervisor is not None
        return Up(self._fleet, False, self._supervisor.pid)

    def _tell(self, word: bytes) -> None:
        self._pipe().write(word)
        self._pipe().flush()

    def _pipe(self) -> IO[bytes]:
        assert self._supervisor is not None
        assert self._supervisor.stdin is not None
        return self._supervisor.stdin

    def _end_leftovers(self) -> None:
        """What a supervisor that was killed has left; jobs are left alone, their agents find them again."""
        status = FleetStatus.read(self._dir)
        if status is not None and (left := status.processes()):
            self._progress.say("Ending what a fleet that has crashed has left ...")
            processes.end(left, grace_s=10.0)
        (self._dir / STOPPING).unlink(missing_ok=True)

    def _undo(self) -> None:
        if self._supervisor is not None:
            (self._dir / STOPPING).touch()
            self._pipe().close()  # the leash: it ends its children in order
            try:
                self._supervisor.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                self._supervisor.wait()
            if self._fresh:
                processes.kill(processes.of_fleet(self._dir))
            (self._dir / STOPPING).unlink(missing_ok=True)
        if self._lock is not None:
            if self._fresh:
                shutil.rmtree(self._dir, ignore_errors=True)
            self._lock.release()
            self._lock = None


def _running(fleet_dir: Path, options: UpOptions) -> Up:
    """The fleet that another process holds the lock of."""
    fleet, status = FleetFile.read(fleet_dir), FleetStatus.read(fleet_dir)
    alive = status is not None and processes.identity(status.pid) == status.identity
    if fleet is None or status is None or not alive or status.phase != "running":
        raise ErgoError(
            f"Another process is just bringing the fleet in {fleet_dir} up or down.",
            code="fleet.busy",
            remedy="Wait for it, or give another --fleet-dir.",
        )
    if not options.agree_with(fleet):
        there = f"--nodes {fleet.nodes} --devices {fleet.devices}"
        ports = (
            f"Temporal at port {fleet.temporal_port}, its UI at {fleet.temporal_ui_port}, Kafka at {fleet.kafka_port}"
        )
        raise ErgoError(
            f"A fleet is up in {fleet_dir} with other options: {there}, {ports}.",
            code="fleet.other-options",
            remedy="Take it down first (`ergo down`), or give another --fleet-dir.",
        )
    return Up(fleet, True, status.pid)
