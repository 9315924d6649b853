"""How the processes of a tree that use its devices end: whether the tree has failed, or one of them was killed.

Whoever starts a tree's ranks ends with a code of its own when one of them is killed, as when one has failed by itself.
The ends of the processes that have claimed channels tell the two apart (docs/design/0003).
"""

from __future__ import annotations

import os
import signal as signals
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from proxy_runtime.process import proc
from proxy_runtime.shim.spec import signal_name

# Launchers end the ranks that are left with these: they are no reason, but have one.
_ASKED = {signals.SIGTERM, signals.SIGINT, signals.SIGHUP}


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended that did not succeed.

    Attributes:
        pid: of the process, as the machine counts.
        signal: what killed it, 0 where it exited with a code.
        at: when that was seen, seconds since the machine's start.
    """

    pid: int
    signal: int
    at: float

    @property
    def killed(self) -> bool:
        """Something from outside, or a fault, has ended it."""
        return self.signal != 0 and self.signal not in _ASKED

    @property
    def sentence(self) -> str:
        return f"process {self.pid} of its tree was killed by {signal_name(self.signal)}"


@dataclass(slots=True)
class Claimants:
    """The processes that have claimed channels of a tree. Looked at again and again from one thread, closed by any."""

    _pids: dict[int, int] = field(default_factory=dict[int, int])
    _open: dict[int, int] = field(default_factory=dict[int, int])
    _first: End | None = None
    _closing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def look(self, claims: Mapping[int, int], processes: Callable[[], Iterable[int]]) -> None:
        """Notes who has come, then who has ended.

        Args:
            claims: by channel the pid, in the tree's namespace, of the process that has it; 0 for nobody.
            processes: host pids of the tree's processes; asked only where somebody has come.
        """
        with self._closing:
            fresh = {pid for slot, pid in claims.items() if pid not in (0, self._pids.get(slot))}
            self._pids = dict(claims)
            if fresh:
                self._meet(pid for pid in processes() if proc.pid_inside(pid) in fresh)
            ends = list(self._ends())
        # Between two looks: a launcher that was told of a failure asks the rest to end, and only then kills.
        order = sorted(ends, key=lambda end: (not end.killed, end.signal != 0))
        if order and self._first is None:
            self._first = order[0]

    def _ends(self) -> Iterator[End]:
        for pid, pidfd in list(self._open.items()):
            if not proc.wait_readable((pidfd,), 0):
                continue
            status = proc.end_of(pid, pidfd)
            os.close(self._open.pop(pid))
            if status:  # else it has succeeded, or nobody can tell any more
                signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                yield End(pid, signal, time.clock_gettime(time.CLOCK_BOOTTIME))

    def _meet(self, pids: Iterable[int]) -> None:
        for pid in pids:
            if pid in self._open:
                continue
            with suppress(OSError):
                self._open[pid] = os.pidfd_open(pid)
            if self._first is not None and proc.started_at(pid) > self._first.at:
                self._first = None  # the tree has gone on after that

    @property
    def killed(self) -> End | None:
        """The process whose death is behind the tree's failure; None where one has failed first, or nobody can tell."""
        return self._first if self._first is not None and self._first.killed else None

    def close(self) -> None:
        """Lets go of all of them. May be called twice."""
        with self._closing:
            while self._open:
                os.close(self._open.popitem()[1])
