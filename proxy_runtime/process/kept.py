"""What CRIU leaves out of its images and a script can tell: on which processors each thread may run.

Who had all that its container had gets all of the next one's; a choice of a thread's own is kept, as far as the
processors exist there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from proxy_runtime.process import proc
from proxy_runtime.process.criu_errors import CriuError
from proxy_runtime.process.namespace import Container

FILE: Final = "affinity.json"


def save(container: Container, directory: Path) -> None:
    """Writes what the threads have chosen, by their numbers inside. The tree must be frozen."""
    usual = os.sched_getaffinity(container.init_pid)
    chosen: dict[int, list[int]] = {}
    for thread in _threads(container):
        with suppress(OSError):
            allowed = os.sched_getaffinity(thread)
            if allowed != usual:
                chosen[proc.pid_inside(thread)] = sorted(allowed)
    (directory / FILE).write_text(json.dumps(chosen))


def load(container: Container, directory: Path) -> None:
    """Gives the restored threads what theirs were; nothing is known of images of older builds.

    Raises:
        CriuError: damaged.
    """
    try:
        found = json.loads((directory / FILE).read_bytes())
        if not isinstance(found, dict) or not all(isinstance(one, list) for one in found.values()):
            raise ValueError("no threads are in it")
    except FileNotFoundError:
        return
    except ValueError as error:
        raise CriuError(f"{directory / FILE} is damaged: {error}.", code="criu.image-damaged",
                        remedy="Go back to another checkpoint.") from error  # fmt: skip
    usual = os.sched_getaffinity(container.init_pid)
    for thread in _threads(container) if found else ():
        allowed = usual & set(found.get(str(proc.pid_inside(thread)), ()))
        if allowed:
            with suppress(OSError):
                os.sched_setaffinity(thread, allowed)


def _threads(container: Container) -> Iterator[int]:
    """Every thread below the keeper."""
    for pid in container.processes():
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                yield int(thread)
