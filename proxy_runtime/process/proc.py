"""What the kernel says about processes. Host pids throughout; a process that is gone is never an error."""

from __future__ import annotations

import fcntl
import os
import select
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_INFO: Final = struct.Struct("=QQ11Ii")  # struct pidfd_info of linux/pidfd.h: mask, cgroup, ids, exit_code
_INFO_EXIT: Final = 1 << 3
_GET_INFO: Final = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11  # _IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)


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


def descriptors(pid: int) -> Iterator[tuple[int, str]]:
    """Open descriptors of a process, and what each leads to."""
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for number in numbers:
        try:
            yield int(number), os.readlink(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue  # closed meanwhile


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


def stands(pid: int) -> bool:
    """Whether no thread of a process runs: all are stopped, or it has ended."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return True
    states = [(_stat(f"{pid}/task/{task}") or "X")[0] for task in tasks]
    return all(state in "TtZXx" for state in states)


def started_at(pid: int) -> float:
    """When a process began, in seconds since the machine's start (`CLOCK_BOOTTIME`); 0 when it is gone."""
    fields = _stat(pid)
    return int(fields[19]) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def end_of(pid: int, pidfd: int) -> int | None:
    """The wait status of a process that has ended and is not a child of ours.

    Returns:
        None while it runs, and where it cannot be known any more: its parent has waited for it, and Linux keeps the
        status for pidfds since 6.15 only.
    """
    status = _kept_status(pidfd)
    if status is None:
        fields = _stat(pid)
        if fields and fields[0] in "ZX":
            return int(fields[49])
        status = _kept_status(pidfd)  # waited for just now
    return status


def _kept_status(pidfd: int) -> int | None:
    words = bytearray(_INFO.size)
    _INFO.pack_into(words, 0, _INFO_EXIT, *[0] * 13)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, words)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(words)
    return status if mask & _INFO_EXIT else None


def _stat(pid: int | str) -> list[str]:
    """Fields of /proc/PID/stat from the third on, or nothing when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def wait_readable(descriptors: Iterable[int], seconds: float) -> bool:
    """Waits until one of some descriptors (of any number, unlike with `select`) can be read or has lost its peer."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(max(0.0, seconds) * 1e3))
