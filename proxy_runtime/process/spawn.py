"""Starting child processes that the kernel kills when this process, and not merely a thread of it, dies.

`PR_SET_PDEATHSIG` fires when the *thread* that forked ends. Therefore all children that use it are forked
from one thread that lives as long as the process.
"""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Start:
    """A program to start. Standard input and error are /dev/null; output is too unless `stdout_fd` is given."""

    argv: Sequence[str]
    env: Mapping[str, str] | None = None
    pass_fds: tuple[int, ...] = ()
    stdout_fd: int = subprocess.DEVNULL


class _Spawner:
    def __init__(self) -> None:
        self.owner = os.getpid()
        self._queue: queue.SimpleQueue[tuple[Start, Future[subprocess.Popen[bytes]]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="ergo-spawner", daemon=True).start()

    def start(self, what: Start) -> subprocess.Popen[bytes]:
        future: Future[subprocess.Popen[bytes]] = Future()
        self._queue.put((what, future))
        return future.result()

    def _work(self) -> None:
        while True:
            what, future = self._queue.get()
            try:
                future.set_result(
                    subprocess.Popen(
                        what.argv,
                        stdin=subprocess.DEVNULL,
                        stdout=what.stdout_fd,
                        stderr=subprocess.DEVNULL,
                        env=what.env,
                        cwd="/",
                        pass_fds=what.pass_fds,
                        start_new_session=True,  # a terminal's Ctrl-C is for the launcher to handle
                    )
                )
            except BaseException as error:  # handed to the caller
                future.set_exception(error)


_lock = threading.Lock()
_spawner: _Spawner | None = None


def spawn(what: Start) -> subprocess.Popen[bytes]:
    """Starts a program from the long-lived thread. Callable from any thread.

    Raises:
        OSError: the program cannot be started.
    """
    global _spawner
    with _lock:
        if _spawner is None or _spawner.owner != os.getpid():  # threads do not survive fork
            _spawner = _Spawner()
        spawner = _spawner
    return spawner.start(what)


def _after_fork() -> None:
    global _lock, _spawner
    _lock, _spawner = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork)
