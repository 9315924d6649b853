"""The zygote: a process that has torch and the device side imported, and forks device proxies from itself.

A fork takes milliseconds where a fresh interpreter takes a second. It stays single-threaded, because only
the forking thread lives on in a child. It ends when its socket closes or its parent process ends, and its
proxies end with it.

    python -m proxy_runtime.device.zygote SOCKET_FD DEVICE_KIND BUILD_ID TORCH ABI

It runs in the job's own interpreter, whose torch and Python must be those that the build is for.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import sys
import sysconfig
from collections.abc import Sequence
from typing import Any, Final

from proxy_runtime.device.frames import FrameSocket

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Serves fork requests until the socket closes or the parent ends."""
    fd, device_kind, build_id, *built_for = int(sys.argv[1]), *sys.argv[2:6]
    parent = os.getppid()
    sock = FrameSocket(socket.socket(fileno=fd))
    sock.socket.set_inheritable(False)
    # Torch first: it brings the libraries that the device side is linked against.
    import torch

    if message := _mismatch((torch.__version__, sysconfig.get_config_var("SOABI")), built_for):
        sock.send({"ok": False, "code": "device-proxy.torch", "error": message})
        return
    import _ergo_device

    from proxy_runtime.device import proxy  # noqa: F401

    if device_kind == "cpu":
        _ergo_device.keep_freed_memory()
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page that holds an object
    sock.send({"ok": True, "pid": os.getpid()})
    _Zygote(sock, device_kind, build_id, parent).serve()


def _mismatch(here: Sequence[object], built_for: Sequence[str]) -> str | None:
    """Why libraries built for one torch and Python cannot be loaded into another."""
    if [str(part) for part in here] == list(built_for):
        return None
    return (
        f"{sys.executable} has torch {here[0]} on {here[1]}, but this build of the runtime is for torch {built_for[0]} "
        f"on {built_for[1]}. Run the job with the interpreter that the build was made for (--python), or make the "
        "build anew."
    )


class _Zygote:
    def __init__(self, sock: FrameSocket, device_kind: str, build_id: str, parent: int) -> None:
        self._socket = sock
        self._device_kind = device_kind
        self._build_id = build_id
        # A parent-death signal would come when the *thread* that started this process ends: the wrong moment.
        self._parent = os.pidfd_open(parent) if os.getppid() == parent else None
        self._children: dict[int, int] = {}  # pidfd -> pid
        self._pid = os.getpid()

    def serve(self) -> None:
        poller = select.poll()
        poller.register(self._socket.socket, select.POLLIN)
        if self._parent is None:
            return
        poller.register(self._parent, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == self._parent:
                    return
                if fd in self._children:
                    poller.unregister(fd)
                    os.waitpid(self._children.pop(fd), 0)
                    os.close(fd)
                    continue
                frame = self._socket.receive(deadline_s=10.0)
                if frame is None:
                    return
                if (pidfd := self._handle(*frame)) is not None:
                    poller.register(pidfd, select.POLLIN)

    def _handle(self, request: dict[str, Any], fds: list[int]) -> int | None:
        """Answers one request; the pidfd of a new child, to be watched."""
        try:
            threads = len(os.listdir("/proc/self/task"))
            if request.get("op") != "fork" or len(fds) != 2:
                self._refuse(request, "device-proxy.request", "The zygote was sent a malformed request.")
            elif threads != 1:
                message = f"The zygote has {threads} threads and can no longer fork; a library started them."
                self._refuse(request, "device-proxy.zygote-threads", message)
            else:
                pid = os.fork()
                if pid == 0:
                    self._child(request, *fds)
                pidfd = os.pidfd_open(pid)
                self._children[pidfd] = pid
                self._socket.send({"id": request.get("id"), "ok": True, "pid": pid}, [pidfd])
                return pidfd
        except OSError as error:
            self._refuse(request, "device-proxy.fork", f"The zygote could not fork a device proxy: {error}.")
        finally:
            for fd in fds:
                os.close(fd)
        return None

    def _refuse(self, request: dict[str, Any], code: str, message: str) -> None:
        self._socket.send({"id": request.get("id"), "ok": False, "code": code, "error": message})

    def _child(self, request: dict[str, Any], control_fd: int, log_fd: int) -> None:
        """Becomes a device proxy and never returns."""
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._pid:
                os._exit(1)
            self._socket.close()
            for fd in (self._parent, *self._children):
                if fd is not None:
                    os.close(fd)
            os.dup2(log_fd, 1)
            os.dup2(log_fd, 2)
            os.close(log_fd)
            from proxy_runtime.device import proxy

            control = FrameSocket(socket.socket(fileno=control_fd))
            threads, ids = int(request.get("threads", 1)), request.get("ids")
            proxy.main(control, self._device_kind, self._build_id, threads, ids if isinstance(ids, dict) else None)
        finally:
            os._exit(1)


if __name__ == "__main__":
    main()
