"""Starting the zygote, and forking device proxies from it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from proxy_runtime.device.connection import DEFAULT_DEADLINE_S, DeviceProxyClient, Path_
from proxy_runtime.device.errors import DeviceProxyError, sentence
from proxy_runtime.device.frames import FrameError, FrameSocket, FrameTimeout


class NativeBuild(Protocol):
    """What is needed of `proxy_runtime.build.Build`."""

    @property
    def id(self) -> str: ...
    @property
    def device_dir(self) -> Path: ...
    @property
    def torch_version(self) -> str: ...
    @property
    def abi(self) -> str: ...


def check_settings(environment: Mapping[str, str]) -> None:
    """Looks at what the environment says of sharing: a proxy takes what it cannot read for something else.

    Raises:
        DeviceProxyError: `device-proxy.setting`, with the variable and what it may be.
    """
    sharing, sampled = environment.get("ERGO_SPLICE") or "on", environment.get("ERGO_SPLICE_VERIFY") or "0"
    if sharing not in ("on", "off"):
        raise _no_setting("ERGO_SPLICE", sharing, "on or off")
    if not re.fullmatch("[0-9]{1,18}", sampled):
        raise _no_setting("ERGO_SPLICE_VERIFY", sampled, "a number: one of so many results is compared; 0: none")


def _no_setting(name: str, value: str, possible: str) -> DeviceProxyError:
    message = f"{name} is {value[:40]!r} in the environment of the device proxies, but must be {possible}."
    return DeviceProxyError(message, code="device-proxy.setting", remedy=f"Correct {name}, or unset it.")


class Zygote:
    """The process that forks warm device proxies. Thread-safe."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, build_id: str) -> None:
        """Use `start`."""
        self._process = process
        self._frames = FrameSocket(sock)
        self._build_id = build_id
        self._lock = threading.Lock()
        self._ready = False
        self._next_id = 1

    @classmethod
    def start(
        cls,
        build: NativeBuild,
        device_kind: str = "cpu",
        env: Mapping[str, str] | None = None,
        *,
        log: Path_ | None = None,
        python: Path_ | None = None,
    ) -> Zygote:
        """Starts a zygote and returns at once; it imports torch meanwhile, and `fork` waits for that.

        Args:
            build: the native build whose device side is used.
            device_kind: `cpu`, or a device type of torch.
            env: environment (default: this process's). Thread counts in it are overruled: the zygote
                must have one thread, and proxies are told their number.
            log: file that its output is appended to (default: inherited).
            python: interpreter that has the build's torch (default: this one); the job's own, so that its device
                computes with the torch that it sees.

        Raises:
            DeviceProxyError: `device-proxy.setting`: see `check_settings`; `.start`.
        """
        check_settings(os.environ if env is None else env)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        package_root = Path(__file__).resolve().parents[2]
        environment = dict(os.environ if env is None else env)
        environment.pop("ERGO_CHANNEL", None)
        for name in ("ERGO_SPLICE", "ERGO_SPLICE_VERIFY"):
            if not environment.get(name):  # empty is unset, as with all settings
                environment.pop(name, None)
        environment |= {
            "PYTHONPATH": f"{package_root}{os.pathsep}{build.device_dir}",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # the rank side has no business here
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        command = [os.fspath(python or sys.executable), "-m", "proxy_runtime.device.zygote"]
        command += [str(theirs.fileno()), device_kind, build.id, build.torch_version, build.abi]
        try:
            with contextlib.ExitStack() as stack:
                output = None if log is None else stack.enter_context(open(log, "ab"))
                stack.enter_context(theirs)
                process = subprocess.Popen(
                    command,
                    cwd="/",  # with -m the working directory is importable, and a user's may hold a torch.py
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is the owner's business
                )
        except OSError as error:
            ours.close()
            raise DeviceProxyError(
                f"The zygote of the device proxies cannot be started: {error}.", code="device-proxy.start"
            ) from error
        return cls(process, ours, build.id)

    @property
    def pid(self) -> int:
        """Process id of the zygote."""
        return self._process.pid

    def fork(
        self,
        log: Path_,
        *,
        threads: int = 1,
        ids: Mapping[str, Any] | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> DeviceProxyClient:
        """Forks a device proxy.

        Args:
            log: file that its output is appended to.
            threads: threads for one operator, fixed for the life of a job.
            ids: whose proxy it is, on every line of its log.
            deadline_s: seconds, the zygote's own start included.

        Raises:
            DeviceProxyError: `device-proxy.start` if the zygote has ended, `.torch` if its torch is not the build's,
                `.deadline`, `.fork`, `.build`.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs, open(log, "ab") as output:
                request = {"op": "fork", "threads": threads, "ids": dict(ids or {})}
                reply, fds = self._request(request, [theirs.fileno(), output.fileno()], deadline_s)
        except BaseException:
            ours.close()
            raise
        client = DeviceProxyClient(ours, int(reply["pid"]), fds[0], self._build_id)
        try:
            client.hello(deadline_s=deadline_s)
        except BaseException:
            client.kill()
            raise
        return client

    def close(self) -> None:
        """Ends the zygote and with it every proxy that it forked. May be called twice."""
        self._frames.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(
        self, request: dict[str, Any], fds: Sequence[int], deadline_s: float
    ) -> tuple[dict[str, Any], list[int]]:
        until = time.monotonic() + deadline_s
        with self._lock:
            request["id"] = self._next_id
            self._next_id += 1
            try:
                if not self._ready:
                    greeting, _ = self._receive(until)
                    if not greeting.get("ok"):
                        raise _refusal(greeting)
                    self._ready = True
                self._frames.send(request, fds, deadline_s=max(0.1, until - time.monotonic()))
                reply, received = self._receive(until)
                while reply.get("id") != request["id"]:
                    for fd in received:
                        os.close(fd)
                    reply, received = self._receive(until)
            except FrameTimeout:
                raise DeviceProxyError(
                    f"The zygote of the device proxies did not answer within {deadline_s:g} s.",
                    code="device-proxy.deadline",
                ) from None
            except (OSError, FrameError) as error:
                raise self._ended() from error
        if not reply.get("ok"):
            raise _refusal(reply)
        return reply, received

    def _receive(self, until: float) -> tuple[dict[str, Any], list[int]]:
        frame = self._frames.receive(deadline_s=max(0.0, until - time.monotonic()))
        if frame is None:
            raise self._ended()
        return frame

    def _ended(self) -> DeviceProxyError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return DeviceProxyError(
            f"The zygote of the device proxies has ended (exit code {self._process.returncode}); its log says why.",
            code="device-proxy.start",
        )


def _refusal(reply: Mapping[str, Any]) -> DeviceProxyError:
    return DeviceProxyError(sentence(str(reply.get("error"))), code=str(reply.get("code") or "device-proxy.fork"))
