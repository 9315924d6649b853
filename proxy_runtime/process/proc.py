"""What the kernel says about processes. Host pids throughout; a process that is gone is never an error."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from pathlib import Path


def status_field(pid: int, name: str) -> str:
    """A field of /proc/PID/status, or an empty string when the process is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return line[len(name) + 1 :].strip()
    except OSError:
        pass
    return ""


def children(pid: int) -> list[int]:
    """Children of all threads of a process."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        try:
            found += [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
        except OSError:
            continue
    return found


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents before their children."""
    found = children(pid)
    for child in found:  # grows while it is walked
        found += children(child)
    return found


def in_pid_namespace_of(pid: int) -> list[int]:
    """All processes whose pid namespace is that of `pid`, descendants of it or not."""
    found: list[int] = []
    try:
        namespace = os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return found
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if os.stat(f"/proc/{entry}/ns/pid").st_ino == namespace:
                found.append(int(entry))
        except OSError:
            continue
    return found


def pid_inside(pid: int) -> int:
    """The pid in the innermost pid namespace, or 0 when the process is gone."""
    numbers = status_field(pid, "NSpid").split()
    return int(numbers[-1]) if numbers else 0


def wait_readable(descriptors: Iterable[int], seconds: float) -> bool:
    """Waits until one of some descriptors (of any number, unlike with `select`) can be read or has lost its peer."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(max(0.0, seconds) * 1e3))
