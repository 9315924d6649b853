"""What a process knows by an inode, which is another one after a restore: its cut is called off.

SQLite knows a file that it has open by device and inode. What it does when both have changed depends on the journal:
the next write fails, or (WAL) a connection made before the cut and one made after it no longer see each other's locks
and index, and rows are lost without a word. Of what is watched with inotify CRIU loses what has happened and was not
read yet, and whoever waits for that waits for ever; it finds a directory by inode: not one that was copied.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from proxy_runtime.process import proc

_MAGIC: Final = b"SQLite format 3\0"


def inode_violations(pid: int) -> list[str]:
    """Sentences about watches, and databases that are open for writing in directories that only the container has."""
    watches = False
    databases: set[str] = set()
    for number, target in proc.descriptors(pid):
        try:
            if target.startswith("anon_inode:inotify"):
                watches |= "inotify wd:" in _info(pid, number)
            elif target.startswith("/") and _is_database(pid, number) and not _is_of_host(pid, number):
                databases.add(target)
        except (OSError, ValueError):
            continue  # closed meanwhile
    found = [f"process {pid} watches files with inotify, and would miss changes: poll instead"] if watches else []
    return found + [
        f"process {pid} has the SQLite database {path} open, which it would not know again: close connections after use"
        for path in sorted(databases)
    ]


def _info(pid: int, number: int) -> str:
    with open(f"/proc/{pid}/fdinfo/{number}") as info:
        return info.read()


def _field(info: str, name: str) -> str:
    return next(line.partition(":")[2].strip() for line in info.splitlines() if line.startswith(name + ":"))


def _is_of_host(pid: int, number: int) -> bool:
    """A mount that is the host's own has the same files, with the same inodes, after a restore on this machine."""
    mount = _mounts(pid).get(_field(_info(pid, number), "mnt_id"))
    return mount in _mounts(os.getpid()).values()


def _is_database(pid: int, number: int) -> bool:
    """Whether a descriptor can write to a database."""
    path = f"/proc/{pid}/fd/{number}"
    if not stat.S_ISREG(os.stat(path).st_mode):
        return False
    if int(_field(_info(pid, number), "flags"), 8) & os.O_ACCMODE != os.O_RDWR:
        return False
    with open(path, "rb", buffering=0) as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _mounts(pid: int) -> dict[str, str]:
    """Of each number: device, root and mount point."""
    try:
        with open(f"/proc/{pid}/mountinfo") as lines:
            fields = [line.split() for line in lines]
    except OSError:
        return {}
    return {each[0]: " ".join(each[2:5]) for each in fields}
