"""Takes a local fleet down, jobs' processes included, and makes sure that nothing of it is left."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from infra.fleet import AGENT
from infra.local import processes
from infra.local.lock import FleetLock
from infra.local.prepare import check_directory
from infra.local.status import FleetStatus
from infra.settings import STOPPING
from proxy_runtime.errors import ErgoError

_SUPERVISOR_S = 90.0
_POLL_S = 0.1
_SWEEPS = 20


def down(fleet_dir: Path, *, purge: bool = False) -> bool:
    """Ends every process of a fleet; what is stored stays for the next `up`, unless `purge`.

    Returns:
        Whether there was anything to end.

    Raises:
        ErgoError: ``fleet.busy``: it is just being brought up; ``fleet.survivors``: processes that cannot be ended;
            ``fleet.directory``: the directory is not a fleet's; ``fleet.purge``: it cannot be removed.
    """
    if not fleet_dir.is_dir():
        return False
    if not (fleet_dir / "lock").exists():  # the first thing that `up` makes
        if purge:
            check_directory(fleet_dir)
            _purge(fleet_dir)
        return False
    check_directory(fleet_dir)
    (fleet_dir / STOPPING).touch()
    lock = FleetLock.take(fleet_dir)
    was_up = lock is None
    if lock is None:
        lock = _end_supervisor(fleet_dir)
    try:
        status = FleetStatus.read(fleet_dir)
        left = status.processes() if status else []
        was_up |= bool(left)
        processes.end(left, grace_s=10.0)
        was_up |= _end_jobs(fleet_dir)
        (fleet_dir / STOPPING).unlink(missing_ok=True)
        if purge:
            _purge(fleet_dir)
    finally:
        lock.release()
    return was_up


def _end_supervisor(fleet_dir: Path) -> FleetLock:
    status = FleetStatus.read(fleet_dir)
    supervisor = psutil.Process(status.pid) if status and processes.identity(status.pid) == status.identity else None
    if supervisor is None:
        (fleet_dir / STOPPING).unlink(missing_ok=True)
        raise ErgoError(
            f"Another process is just bringing the fleet in {fleet_dir} up or down.",
            code="fleet.busy",
            remedy="Wait for it, or end it with Ctrl-C, which leaves nothing.",
        )
    supervisor.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _SUPERVISOR_S
    while (lock := FleetLock.take(fleet_dir)) is None:
        if time.monotonic() > deadline:
            processes.kill([supervisor])
            deadline = float("inf")
        time.sleep(_POLL_S)
    return lock


def _end_jobs(fleet_dir: Path) -> bool:
    """Shims are in sessions of their own and outlive their agents: each node ends what it has, the rest is killed."""
    found = processes.of_fleet(fleet_dir)
    if not found:
        return False
    for node in sorted((fleet_dir / "nodes").glob("*/")):
        words = [sys.executable, "-m", AGENT, "--name", node.name, "--dir", str(node), "--end-all"]
        environment = processes.python_environment(fleet_dir)
        try:
            subprocess.run(words, env=environment, cwd="/", capture_output=True, timeout=30, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            continue  # what it has not ended is killed below
    for _ in range(_SWEEPS):  # one that is just being forked is found by the next sweep
        found = processes.of_fleet(fleet_dir)
        if not found:
            return True
        processes.kill(found)
    raise ErgoError(
        f"{len(found)} processes of the fleet cannot be ended: {', '.join(str(process.pid) for process in found)}.",
        code="fleet.survivors",
        remedy="Look at what they wait for (`ps -o pid,stat,wchan,args`), and run `ergo down` again.",
    )


def _purge(fleet_dir: Path) -> None:
    try:
        shutil.rmtree(fleet_dir)
    except OSError as error:
        raise ErgoError(
            f"{fleet_dir} cannot be removed: {error.strerror} ({error.filename}).",
            code="fleet.purge",
            remedy="Remove it by hand.",
        ) from error
