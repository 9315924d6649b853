"""Which processes belong to a run directory, and ending them for certain.

A shim owns all processes of its part and they die with it: containers and the zygote carry PR_SET_PDEATHSIG, proxies
leave when their socket closes. Here is the proof, from what /proc says, and the last resort.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from proxy_runtime.node.errors import NodeError

_POLL_S = 0.01


def of_run(run: Path) -> list[int]:
    """Pids of living processes that belong to a run directory: by command line, output files or mounts."""
    needle = os.fsencode(str(run)) + b"/"
    ours = _mounts_of("self")
    return [pid for pid in _pids() if pid != os.getpid() and not _zombie(pid) and _belongs(pid, needle, ours)]


def end_all(run: Path, deadline_s: float = 20.0) -> None:
    """Kills everything that belongs to a run directory and returns when nothing of it is left.

    Raises:
        NodeError: ``node.not-ended``: something cannot be killed; the sentence names it.
    """
    limit = time.monotonic() + deadline_s
    while left := of_run(run):
        if time.monotonic() > limit:
            names = ", ".join(f"{pid} ({_command(pid)})" for pid in left)
            raise NodeError(
                f"Processes of {run.name} do not end within {deadline_s:g} s: {names}.",
                code="node.not-ended",
                remedy="They hang in the kernel; look at what they wait for, or restart the machine.",
            )
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (OSError, IndexError):
        return True  # gone


def _belongs(pid: int, needle: bytes, ours: str) -> bool:
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.fsencode(os.readlink(f"/proc/{pid}/fd/{descriptor}")).startswith(needle):
                return True
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b"/")
        if needle in command and b"proxy_runtime.shim" in command:
            return True
    if _mounts_of(str(pid)) == ours:
        return False
    with suppress(OSError):  # mounts of a container: the overlay's and the bind's sources
        return needle in Path(f"/proc/{pid}/mountinfo").read_bytes()
    return False


def _mounts_of(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return ""


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:80]
    except OSError:
        return "gone"
