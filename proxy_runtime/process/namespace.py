"""Containers: a rank and its children under a minimal pid 1, in pid and mount (and network) namespaces of their own.

Nothing of a container survives its launcher: the kernel kills pid 1 when the launching process dies, and
everything inside when pid 1 dies.
"""

from __future__ import annotations

import os
import signal as signals
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from proxy_runtime.process import proc
from proxy_runtime.process.container_spec import ContainerError, ContainerSpec, ExitStatus, Network, Overlay
from proxy_runtime.process.spawn import Start, spawn

__all__ = [
    "Container",
    "ContainerError",
    "ContainerSpec",
    "ExitStatus",
    "Network",
    "Overlay",
    "Volume",
    "hold_volume",
    "launch",
    "launch_empty",
]


def launch(
    init_binary: Path | str, spec: ContainerSpec, *, mounts_of: Volume | None = None, deadline_s: float = 30.0
) -> Container:
    """Starts `spec.argv` as the rank of a fresh container.

    Args:
        init_binary: the compiled `init.c`.
        spec: the container.
        mounts_of: the volume whose mounts the container starts from.
        deadline_s: seconds until the rank must have been executed.

    Raises:
        ContainerError: `container.not-permitted`, `container.setup` (the sentence says which part),
            `container.timeout`. Nothing is left behind.
    """
    if not spec.argv:
        raise ValueError("a container needs a program to run")
    return _start(init_binary, spec, mounts_of, "running", deadline_s)


def launch_empty(
    init_binary: Path | str,
    spec: ContainerSpec,
    *,
    mounts_of: Volume | None = None,
    deadline_s: float = 30.0,
    shm_before: tuple[int, ...] = (),
) -> Container:
    """Makes a container without a rank, for a restore; its /dev/shm is none of `shm_before`. Errors as `launch`."""
    return _start(init_binary, spec, mounts_of, "ready", deadline_s, shm_before)


def hold_volume(init_binary: Path | str, overlay: Overlay, *, deadline_s: float = 30.0) -> Volume:
    """Mounts an overlay once for all containers of a job, visible to nobody else.

    Raises:
        ContainerError: as `launch`.
    """
    options = ["--hold", *_overlay_options(overlay)]
    volume = Volume(*_start_init(init_binary, options, {}, ()))
    return _await(volume, "ready", deadline_s)


class _Supervised:
    """A running init and the socket to it. Thread-safe; `fileno` is readable when there is news."""

    def __init__(self, first_stage: subprocess.Popen[bytes], status: socket.socket, init_binary: Path) -> None:
        self.init_binary = init_binary
        self.init_pid = 0
        self._first_stage = first_stage
        self._status = status
        self._lock = threading.RLock()
        self._buffer = b""
        self._error = ""
        self._ready = False
        self._closed = False
        self._init_pidfd = -1

    def fileno(self) -> int:
        return self._status.fileno()

    def kill(self, *, deadline_s: float = 30.0) -> None:
        """Ends everything inside and returns when every process is gone. Idempotent.

        Raises:
            ContainerError: `container.unkillable`: a process hangs in the kernel.
        """
        with self._lock:
            if self._init_pidfd >= 0:
                with suppress(ProcessLookupError):
                    signals.pidfd_send_signal(self._init_pidfd, signals.SIGKILL)
            elif not self._closed:
                self._first_stage.kill()
        try:
            # The kernel lets pid 1 end only after everything inside has been reaped.
            self._first_stage.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise ContainerError(
                f"processes under pid {self.init_pid} cannot be killed: they hang in the kernel.",
                code="container.unkillable",
                remedy="Look at their wait channel with `ps -o pid,stat,wchan`; a dead file server is the usual cause.",
            ) from None
        with self._lock:
            self._drain()
            self._close()

    def __enter__(self):  # noqa: ANN204  Self is 3.11, pyright infers it
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._status.close()
            for pidfd in (self._init_pidfd,):
                if pidfd >= 0:
                    os.close(pidfd)
            self._init_pidfd = -1

    def _drain(self) -> bool:
        """Reads what has arrived; False once the other end is closed."""
        if self._closed:
            return False
        while True:
            try:
                data = self._status.recv(4096)
            except BlockingIOError:
                return True
            except OSError:
                data = b""
            if not data:
                return False
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                word, _, rest = line.decode(errors="replace").partition(" ")
                self._line(word, rest)

    def _line(self, word: str, rest: str) -> None:
        if word == "error":
            self._error = rest
        elif word == "ready":
            self._ready = True
        elif word == "init":
            self.init_pid = int(rest)
            with suppress(ProcessLookupError):  # already gone: the socket says so
                pidfd = os.pidfd_open(self.init_pid)
                first = self._first_stage.pid
                if first == self.init_pid or proc.status_field(self.init_pid, "PPid") == str(first):
                    self._init_pidfd = pidfd
                else:  # gone, and the number in use again
                    os.close(pidfd)

    def _reached(self, word: str) -> bool:
        return self._ready if word == "ready" else False

    def _await(self, word: str, deadline_s: float) -> None:
        limit = time.monotonic() + deadline_s
        while True:
            with self._lock:
                open_ = self._drain()
                # Two processes write to the socket: what pid 1 says may come before its pid.
                if self.init_pid and self._reached(word):
                    return
                if self._error or not open_:
                    raise _setup_error(self._error or f"its pid 1 ended while it was made ({word} was awaited)")
            left = limit - time.monotonic()
            if left <= 0:
                raise ContainerError(
                    f"the container did not get to {word!r} within {deadline_s:g} s.",
                    code="container.timeout",
                    remedy="Look for a file system that does not answer.",
                )
            proc.wait_readable((self.fileno(),), left)


class Volume(_Supervised):
    """A mount namespace with a job's overlay in it. Containers made from it share the mount."""


class Container(_Supervised):
    """A rank in its namespaces.

    Attributes:
        init_pid: host pid of pid 1.
        rank_pid: host pid of the rank; 0 while a restored container has none yet.
        keeper_pid: host pid of its parent, the root of the tree that is dumped.
        network: what it was made with.
        shm_before: device numbers that /dev/shm had in earlier containers of the same processes.
    """

    def __init__(
        self,
        first_stage: subprocess.Popen[bytes],
        status: socket.socket,
        init_binary: Path,
        network: Network,
        shm_before: tuple[int, ...] = (),
    ) -> None:
        super().__init__(first_stage, status, init_binary)
        self.network: Network = network
        self.shm_before = shm_before
        self.rank_pid = 0
        self.keeper_pid = 0
        self._running = False
        self._exit: ExitStatus | None = None
        self._rank_pidfd = -1

    def poll(self) -> ExitStatus | None:
        """How the rank ended, or None while it runs."""
        with self._lock:
            if self._exit is None and not self._drain() and self._exit is None:
                self._exit = ExitStatus(128 + signals.SIGKILL, signals.SIGKILL, lost=True)
            return self._exit

    def wait(self, timeout: float | None = None) -> ExitStatus | None:
        """Waits until the rank has ended, at most `timeout` seconds; None when it still runs."""
        limit = None if timeout is None else time.monotonic() + timeout
        while True:
            status = self.poll()
            if status is not None:
                return status
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                return None
            # In slices: `kill` in another thread closes the descriptor, which wakes nobody.
            step = 0.5 if left is None else min(left, 0.5)
            with suppress(OSError, ValueError):
                proc.wait_readable((self.fileno(),), step)

    def processes(self) -> list[int]:
        """Host pids of the rank and of everything it has started that still lives."""
        return proc.descendants(self.keeper_pid) if self.keeper_pid else []

    def strangers(self) -> list[int]:
        """Living processes in the container that are not below the keeper: host pids."""
        found: list[int] = []
        for child in proc.children(self.init_pid):
            if child != self.keeper_pid and proc.status_field(child, "State")[:1] not in ("", "Z"):
                found += [child, *proc.descendants(child)]
        return found

    def end_strangers(self) -> None:
        """Kills what a CRIU that was killed has left in the container."""
        for pid in self.strangers():
            with suppress(ProcessLookupError):
                os.kill(pid, signals.SIGKILL)

    def signal(self, number: int) -> None:
        """Sends a signal to the rank.

        Raises:
            ProcessLookupError: it has ended.
        """
        with self._lock:
            if self._rank_pidfd < 0 or self.poll() is not None:
                raise ProcessLookupError("the rank has ended")
            signals.pidfd_send_signal(self._rank_pidfd, number)

    def adopt(self, keeper_inside: int, *, deadline_s: float = 10.0) -> None:
        """Tells pid 1 which of the restored processes is the keeper.

        Raises:
            ContainerError: there is no such process (`container.no-rank`), or as `launch`.
        """
        rank_inside = keeper_inside + 1  # nobody forks between the two in a fresh pid namespace
        for pid in proc.in_pid_namespace_of(self.init_pid):
            if proc.pid_inside(pid) == rank_inside:
                self._set_rank(pid)
                break
        else:
            raise ContainerError(f"no process {rank_inside} was restored.", code="container.no-rank")
        with suppress(OSError):  # pid 1 gone: noticed below
            self._status.sendall(f"rank {keeper_inside} {rank_inside}\n".encode())
        self._await("running", deadline_s)

    def _set_rank(self, pid: int) -> None:
        self.rank_pid = pid
        self.keeper_pid = int(proc.status_field(pid, "PPid") or 0)
        with suppress(ProcessLookupError):
            self._rank_pidfd = os.pidfd_open(pid)

    def _line(self, word: str, rest: str) -> None:
        if word == "running":
            self._running = True
            host_pid = int(rest.split()[1])
            if host_pid:
                self._set_rank(host_pid)
        elif word == "exit":
            self._exit = ExitStatus(int(rest))
        elif word == "signal":
            self._exit = ExitStatus(128 + int(rest), int(rest))
        else:
            super()._line(word, rest)

    def _reached(self, word: str) -> bool:
        return self._running if word == "running" else super()._reached(word)

    def _close(self) -> None:
        if not self._closed:
            self._exit = self._exit or ExitStatus(128 + signals.SIGKILL, signals.SIGKILL, lost=True)
            if self._rank_pidfd >= 0:
                os.close(self._rank_pidfd)
                self._rank_pidfd = -1
        super()._close()


def _start(
    init_binary: Path | str,
    spec: ContainerSpec,
    mounts_of: Volume | None,
    word: str,
    deadline_s: float,
    shm_before: tuple[int, ...] = (),
) -> Container:
    options: list[str] = [] if mounts_of is None else ["--mounts-of", str(mounts_of.init_pid)]
    if spec.overlay is not None:
        options += _overlay_options(spec.overlay)
    for source, destination in spec.binds:
        options += ["--bind", str(source), str(destination)]
    options += ["--net", spec.network]
    if word == "ready":
        if shm_before:
            options += ["--no-shm", ",".join(map(str, shm_before))]
        container = Container(*_start_init(init_binary, [*options, "--restore"], {}, ()), spec.network, shm_before)
        return _await(container, word, deadline_s)
    options += ["--cwd", str(spec.cwd), "--first-pid", str(spec.first_pid)]
    if spec.log is not None:
        options += ["--log", str(spec.log)]
    if spec.no_aslr:
        options.append("--no-aslr")
    keep: tuple[int, ...] = ()
    if spec.keep_fd is not None:
        keep = (spec.keep_fd,)
        options += ["--keep-fd", str(spec.keep_fd)]
    for fd in sorted(spec.keeper_fds):
        options += ["--keeper-fd", str(fd)]
    keep += spec.keeper_fds
    container = Container(*_start_init(init_binary, [*options, "--", *spec.argv], spec.env, keep), spec.network)
    return _await(container, word, deadline_s)


def _overlay_options(overlay: Overlay) -> list[str]:
    return ["--overlay", str(overlay.lower), str(overlay.upper), str(overlay.work), str(overlay.mountpoint)]


def _start_init(
    init_binary: Path | str, options: list[str], env: Mapping[str, str], keep: tuple[int, ...]
) -> tuple[subprocess.Popen[bytes], socket.socket, Path]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        common = [str(Path(init_binary).absolute()), "--status-fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        try:
            process = spawn(Start([*common, *options], env, (theirs.fileno(), *keep)))
        except OSError as error:
            ours.close()
            raise ContainerError(
                f"{init_binary} cannot be started: {error.strerror}.",
                code="container.no-init",
                remedy="Remove the build directory; it is made anew.",
            ) from error
    return process, ours, Path(init_binary).absolute()


_S = TypeVar("_S", bound=_Supervised)


def _await(supervised: _S, word: str, deadline_s: float) -> _S:
    try:
        supervised._await(word, deadline_s)
    except BaseException:
        supervised.kill()
        raise
    return supervised


def _setup_error(reason: str) -> ContainerError:
    if reason.endswith("Operation not permitted"):
        return ContainerError(
            f"a container cannot be made: {reason}.",
            code="container.not-permitted",
            remedy="Run as root with CAP_SYS_ADMIN; `ergo doctor` shows what is missing.",
        )
    return ContainerError(f"a container cannot be made: {reason}.", code="container.setup")
