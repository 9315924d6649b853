"""Processes of a local fleet: how they are started, recognised and ended. They are known by their environment, never
by a name that somebody else's process may have too.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

MARK = "ERGO_FLEET_PROCESS"
"""In the environment of every process of a fleet, jobs' shims included: the fleet's directory."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def python_environment(fleet_dir: Path) -> dict[str, str]:
    """Environment of a Python process of the fleet. Its directory is explicit, whatever the caller's default is."""
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": root, "ERGO_FLEET_DIR": str(fleet_dir), MARK: str(fleet_dir)}


def die_with_parent(number: int = signal.SIGTERM) -> Callable[[], None]:
    """For `preexec_fn`: the child gets a signal when its parent dies, however that dies; signals are unblocked."""
    parent = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # it has died in between

    return prepare


def identity(pid: int) -> float | None:
    """When a process was started, which tells it from a later one of the same id; None where there is none."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def of_fleet(fleet_dir: Path, *, leave_out: Iterable[int] = ()) -> list[psutil.Process]:
    """Every process of a fleet: what the supervisor has started, and shims of jobs with all that they have inside."""
    mark = str(fleet_dir)
    mine = {os.getpid(), *leave_out}
    return [process for process in _all() if process.pid not in mine and _belongs(process, mark)]


def kill(processes: Iterable[psutil.Process], *, patience_s: float = 10.0) -> list[psutil.Process]:
    """Ends processes with SIGKILL and waits; returns those that are still there."""
    found = list(processes)
    for process in found:
        _signal(process, signal.SIGKILL)
    return psutil.wait_procs(found, timeout=patience_s)[1]


def end(processes: Iterable[psutil.Process], *, grace_s: float) -> list[psutil.Process]:
    """Ends processes politely, then with SIGKILL; returns those that are still there."""
    found = list(processes)
    for process in found:
        _signal(process, signal.SIGTERM)
    return kill(psutil.wait_procs(found, timeout=grace_s)[1])


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)  # psutil compares start times first: never another process of the same id
    except psutil.Error:
        pass  # gone


def _all() -> Iterator[psutil.Process]:
    for pid in psutil.pids():
        try:
            yield psutil.Process(pid)
        except psutil.Error:
            continue


def _belongs(process: psutil.Process, mark: str) -> bool:
    try:
        if process.environ().get(MARK) == mark:
            return process.status() != psutil.STATUS_ZOMBIE
        arguments = process.cmdline()
    except (psutil.Error, OSError):
        return False
    # A shim whose environment was cleaned: its run directory is an argument of it.
    ours = any(argument.startswith("proxy_runtime") for argument in arguments)
    return ours and any(argument.startswith(f"{mark}/nodes/") for argument in arguments)
