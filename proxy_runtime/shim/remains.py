"""What is left of a part on the machine: its shim, its processes, its run directory."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

from proxy_runtime.shim.client import connect
from proxy_runtime.shim.kept import keep
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.spec import RunError

_PERIOD_S = 0.02
_INIT = "/ergo-init"  # the program of `Build.init_binary`
_KEEPER = "--keeper"  # the process between an init and its rank; it ends before its init


def shim_of(layout: RunLayout) -> int:
    """A pidfd of the shim that listens in a run directory, to be closed by the caller; -1 where there is none.

    It is found even if it hangs: the kernel tells who listens.
    """
    try:
        with connect(layout) as connection:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return os.pidfd_open(struct.unpack("3i", credentials)[0])
    except OSError:
        return -1


def processes(layout: RunLayout) -> dict[int, str]:
    """Host pids and command lines of what belongs to a run directory: shim, zygote, proxies, inits.

    A rank has an init above it, which cannot end before it. Whoever merely reads a file there is left out.
    """
    root = str(layout.root)
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            words = os.fsdecode((entry / "cmdline").read_bytes()).split("\0")
            if not any(word.startswith("proxy_runtime.") or word.endswith(_INIT) for word in words):
                continue
            if _KEEPER in words:  # restored, it has the command line of the epoch in which it was first started
                continue
            # The shim and the inits name it on their command lines; zygote and proxies write their logs to it.
            if any(_below(word, root) for word in words) or _below(os.readlink(entry / "fd/1"), root):
                found[int(entry.name)] = " ".join(words)
    return found


def require_gone(layout: RunLayout, limit: float) -> None:
    """Waits until no process of a run directory is left.

    Args:
        layout: whose.
        limit: until when, as `time.monotonic` counts.

    Raises:
        RunError: `run.not-ended`, with their pids.
    """
    while left := processes(layout):
        if time.monotonic() > limit:
            raise RunError(
                f"{len(left)} processes of {layout.root.name} do not end: "
                + "; ".join(f"{pid} ({words[:60]})" for pid, words in left.items()),
                code="run.not-ended",
                remedy="They hang in the kernel, usually at a file server that does not answer.",
            )
        time.sleep(_PERIOD_S)


def remove(layout: RunLayout) -> None:
    """Removes a run directory whose processes are gone; what they have logged is kept in the node's log of parts.

    The mount points under /run/ergo stay: other nodes of the same machine may have them mounted, and removing a
    directory that is a mount point in another namespace detaches it there.
    """
    with suppress(OSError):  # a full disk keeps nothing from ending
        keep(layout)
    shutil.rmtree(layout.root, ignore_errors=True)
    if layout.root.exists():  # a log written in the last moment
        shutil.rmtree(layout.root)


def _below(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")
