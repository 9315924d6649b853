"""Keeps the processes of a local fleet running: starts each when what it needs answers, and again when it has ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from infra.local.ports import accepts
from infra.local.processes import die_with_parent, identity
from infra.local.status import ChildStatus, FleetStatus, Phase

log = structlog.get_logger(__name__)

_TICK_S = 0.25
_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 15.0
# A child that has run for so long is started again at once: what made it end before is over.
_SETTLED_S = 60.0
_LOG_BYTES = 64 << 20
_LOG_CHECK_S = 30.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


@dataclass(frozen=True, slots=True)
class Child:
    """A process to keep running.

    Attributes:
        name: also that of its log file.
        needs: ports of this machine that must answer before it is started.
        stage: those of a higher one are ended first.
        grace_s: seconds between SIGTERM and SIGKILL when the fleet goes down.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    needs: tuple[int, ...] = ()
    stage: int = 0
    grace_s: float = 10.0


@dataclass(slots=True)
class _Kept:
    child: Child
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    identity: float = 0.0
    starts: int = 0
    wait_s: float = 0.0
    not_before: float = 0.0
    last_end: str = ""
    stopping: bool = field(default=False)


class Supervisor:
    """Owns children. All happens in the thread that calls `run`: what it forks dies with that thread's process."""

    def __init__(self, fleet_dir: Path, children: Sequence[Child]) -> None:
        self._fleet_dir = fleet_dir
        self._kept = [_Kept(child) for child in children]
        self._told: FleetStatus | None = None
        self._logs_checked = 0.0

    def run(self, phase: Callable[[], Phase | None] = lambda: "running") -> None:
        """Runs children until SIGTERM or SIGINT comes or `phase` says None; then ends them all, in order."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            while (now := phase()) is not None:
                for kept in self._kept:
                    self._care(kept)
                self._tell(now)
                self._trim_logs()
                woken = signal.sigtimedwait(_SIGNALS, _TICK_S)
                if woken is not None and woken.si_signo != signal.SIGCHLD:
                    log.info("the fleet goes down", signal=signal.Signals(woken.si_signo).name)
                    break
        finally:
            self._stop()

    def _care(self, kept: _Kept) -> None:
        now = time.monotonic()
        if kept.process is not None:
            code = kept.process.poll()
            if code is None:
                return
            kept.process = None
            kept.last_end = _ending(code)
            settled = now - kept.started >= _SETTLED_S
            kept.wait_s = 0.0 if settled else min(max(kept.wait_s * 2, _FIRST_WAIT_S), _LONGEST_WAIT_S)
            kept.not_before = now + kept.wait_s
            log.warning(
                "a process has ended and is started again",
                child=kept.child.name,
                end=kept.last_end,
                wait_s=kept.wait_s,
                starts=kept.starts,
            )
        if now >= kept.not_before and all(accepts(port) for port in kept.child.needs):
            self._start(kept)

    def _start(self, kept: _Kept) -> None:
        child = kept.child
        kept.starts += 1
        kept.started = time.monotonic()
        with _log_path(self._fleet_dir, child.name).open("ab") as output:
            try:
                kept.process = subprocess.Popen(
                    child.arguments,
                    env=dict(child.environment),
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a Ctrl-C of the terminal is for whoever has typed the command
                    preexec_fn=die_with_parent(),
                )
            except OSError as error:
                kept.last_end = f"could not be started: {error.strerror}"
                kept.wait_s = _LONGEST_WAIT_S
                kept.not_before = kept.started + kept.wait_s
                log.error("a process could not be started", child=child.name, error=str(error))
                return
        kept.identity = identity(kept.process.pid) or 0.0
        log.info("started", child=child.name, pid=kept.process.pid, starts=kept.starts)

    def _stop(self) -> None:
        self._tell("stopping")
        for stage in sorted({kept.child.stage for kept in self._kept}, reverse=True):
            running = [kept for kept in self._kept if kept.child.stage == stage and kept.process is not None]
            for kept in running:
                _send(kept, signal.SIGTERM)
            deadline = time.monotonic() + max((kept.child.grace_s for kept in running), default=0.0)
            for kept in running:
                assert kept.process is not None
                try:
                    kept.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    log.warning("did not end in time and is killed", child=kept.child.name)
                    _send(kept, signal.SIGKILL)
                    kept.process.wait()
                kept.process = None
            self._tell("stopping")

    def _tell(self, phase: Phase) -> None:
        status = FleetStatus(
            pid=os.getpid(),
            identity=identity(os.getpid()) or 0.0,
            phase=phase,
            children=tuple(
                ChildStatus(
                    name=kept.child.name,
                    pid=kept.process.pid if kept.process else None,
                    identity=kept.identity,
                    starts=kept.starts,
                    last_end=kept.last_end,
                )
                for kept in self._kept
            ),
        )
        if status != self._told:
            try:
                status.write(self._fleet_dir)
                self._told = status
            except OSError as error:
                log.error("the fleet's status cannot be written", error=str(error))  # a full disk ends nobody

    def _trim_logs(self) -> None:
        now = time.monotonic()
        if now - self._logs_checked < _LOG_CHECK_S:
            return
        self._logs_checked = now
        for kept in self._kept:
            trim_log(_log_path(self._fleet_dir, kept.child.name))


def trim_log(path: Path, limit: int = _LOG_BYTES) -> None:
    """Keeps the newest of a log and one older piece. Its writer appends, so that it goes on at the new end."""
    try:
        if path.exists() and path.stat().st_size > limit:
            shutil.copyfile(path, path.with_suffix(".1.log"))
            os.truncate(path, 0)
    except OSError as error:
        log.warning("a log cannot be trimmed", path=str(path), error=str(error))


def _log_path(fleet_dir: Path, name: str) -> Path:
    return fleet_dir / "logs" / f"{name}.log"


def _send(kept: _Kept, number: int) -> None:
    if kept.process is not None:
        kept.process.send_signal(number)


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
