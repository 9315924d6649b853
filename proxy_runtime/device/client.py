"""The owner's side of device proxies: the zygote that makes them, a client for each, and their fabric."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Protocol

from proxy_runtime.channel.ring import PROTOCOL_VERSION
from proxy_runtime.device.frames import FrameError, FrameSocket, FrameTimeout
from proxy_runtime.errors import ErgoError

DEFAULT_DEADLINE_S: Final = 60.0
_TRANSPORT_MARGIN_S: Final = 3.0  # beyond the deadline that the proxy itself keeps

Path_ = str | os.PathLike[str]
Transport = Literal["shm", "tcp"]


class DeviceProxyError(ErgoError):
    """A device proxy or its zygote failed, or refused a request.

    Codes: `device-proxy.gone` (it has ended), `.deadline`, `.build`, `.protocol`, `.order` (not now),
    `.rank`, `.ring`, `.device-kind`, `.fabric`, `.targets`, `.dump`, `.meta`, `.storages`, `.request`,
    `.internal`, `.start`, `.fork`, `.zygote-threads`.
    """

    code = "device-proxy"


class NativeBuild(Protocol):
    """What is needed of `proxy_runtime.build.Build`."""

    @property
    def id(self) -> str: ...
    @property
    def device_dir(self) -> Path: ...


@dataclass(frozen=True, slots=True)
class ProxyInfo:
    """What a proxy says of itself.

    Attributes:
        pid: its process.
        build: id of the build it runs.
        shm_segment_bytes: size of the memfd that joins it to another proxy of the node.
    """

    pid: int
    build: str
    shm_segment_bytes: int


class DeviceProxyClient:
    """A connection to one device proxy. Thread-safe; requests are answered one after another.

    Every method raises `DeviceProxyError`. Closing the client ends the proxy.
    """

    def __init__(self, sock: socket.socket, pid: int, pidfd: int, build_id: str) -> None:
        """Takes the socket and the pidfd over. Use `Zygote.fork`."""
        self.pid = pid
        self._frames = FrameSocket(sock)
        self._pidfd = pidfd
        self._lock = threading.Lock()
        self._next_id = 1
        self._build_id = build_id

    def hello(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> ProxyInfo:
        """Compares builds and protocol versions."""
        reply = self._call("hello", deadline_s, build=self._build_id, protocol=PROTOCOL_VERSION)
        return ProxyInfo(reply["pid"], reply["build"], reply["shm_segment_bytes"])

    def fabric(
        self,
        self_index: int,
        ranks: Sequence[int],
        token: str,
        peers: Sequence[Mapping[str, Any]],
        descriptors: Sequence[int] = (),
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        """Connects the proxy to its peers; returns when all are connected. See `connect_fabric`.

        Args:
            self_index: index of this proxy.
            ranks: for each global rank the index of its proxy.
            token: the job's secret.
            peers: `{"index", "kind": "shm"}` or `{"index", "kind": "tcp", "listen" | "connect": [host, port]}`.
            descriptors: segments of the shm peers, in their order.
        """
        self._call(
            "fabric",
            deadline_s,
            descriptors,
            self=self_index,
            proxies=max(ranks, default=0) + 1,
            ranks=list(ranks),
            token=token,
            peers=list(peers),
        )

    def attach(self, rank: int, ring_fd: int, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """Gives the proxy a rank's ring; the descriptor stays the caller's."""
        self._call("attach", deadline_s, [ring_fd], rank=rank)

    def load(self, rank: int, meta: Path_, storages: Path_, *, deadline_s: float = DEFAULT_DEADLINE_S) -> dict[str, Any]:
        """Fills an attached rank from a dump. `counts` of the reply: its collectives, by sequence."""
        return self._call("load", deadline_s, rank=rank, meta=os.fspath(meta), storages=os.fspath(storages))

    def run(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """Lets the proxy execute its ranks' messages."""
        self._call("run", deadline_s)

    def stop(self, *, at_step: int | None = None, deadline_s: float = DEFAULT_DEADLINE_S) -> dict[str, Any]:
        """Stops every queue at a message boundary: now, or right after step `at_step`.

        Ranks that have not come to that step by the deadline are stopped where they are.

        Returns:
            `ranks`: rank (text) -> `step`, `exited`, `failure` and `comms`: sequence -> `contributed`,
            `completed`, `members`; `reached`: every rank stands at `at_step`.
        """
        return self._call("stop", deadline_s, at_step=at_step)

    def finish(self, targets: Mapping[str, int], *, deadline_s: float = DEFAULT_DEADLINE_S) -> dict[str, Any]:
        """Completes the collectives up to the targets, and the store requests that are under way.

        Returns:
            `completed`: sequence -> rank (text) -> count; `pending_operations`, `pending_bytes`: issued
            beyond the targets.
        """
        return self._call("finish", deadline_s, targets=dict(targets))

    def dump(self, rank: int, meta: Path_, storages: Path_, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        """Writes a rank's device state to two files; returns the size of `storages` in bytes."""
        reply = self._call("dump", deadline_s, rank=rank, meta=os.fspath(meta), storages=os.fspath(storages))
        return int(reply["bytes"])

    def resume(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """Forgets a stop; legal at any time."""
        self._call("resume", deadline_s)

    def stats(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> dict[str, Any]:
        """Counters of the proxy and of its ranks."""
        return self._call("stats", deadline_s)

    @property
    def alive(self) -> bool:
        """The proxy's process has not ended."""
        return self._pidfd >= 0 and not select.select([self._pidfd], [], [], 0)[0]

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process has ended, for select and poll."""
        return self._pidfd

    def exit(self, *, deadline_s: float = 5.0) -> None:
        """Asks the proxy to end, then ends it."""
        with contextlib.suppress(DeviceProxyError):
            self._call("exit", deadline_s)
        self.kill()

    def kill(self) -> None:
        """Ends the proxy at once and waits until it is gone. May be called twice."""
        if self._pidfd < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        select.select([self._pidfd], [], [], 10.0)
        os.close(self._pidfd)
        self._pidfd = -1
        self._frames.close()

    def close(self) -> None:
        """The same as `kill`: a proxy does not outlive its client."""
        self.kill()

    def __enter__(self) -> DeviceProxyClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    def _call(self, operation: str, deadline_s: float, descriptors: Sequence[int] = (), /, **fields: Any) -> dict[str, Any]:
        with self._lock:
            request_id = self._next_id
            self._next_id += 1
            until = time.monotonic() + deadline_s + _TRANSPORT_MARGIN_S
            try:
                self._frames.send(
                    {"op": operation, "id": request_id, "deadline_s": deadline_s, **fields},
                    descriptors,
                    deadline_s=deadline_s,
                )
                while True:
                    frame = self._frames.receive(deadline_s=max(0.0, until - time.monotonic()))
                    if frame is None:
                        raise self._gone(operation)
                    reply, _ = frame
                    if reply.get("id") == request_id:  # not the late answer to a request that was given up
                        break
            except FrameTimeout:
                raise DeviceProxyError(
                    f"The device proxy (process {self.pid}) did not answer '{operation}' within {deadline_s:g} s.",
                    code="device-proxy.deadline",
                ) from None
            except (OSError, FrameError) as error:
                raise self._gone(operation) from error
        if not reply.get("ok"):
            code = str(reply.get("code") or "device-proxy.internal")
            raise DeviceProxyError(f"Device proxy, {operation}: {_sentence(str(reply.get('error')))}", code=code)
        return reply

    def _gone(self, operation: str) -> DeviceProxyError:
        return DeviceProxyError(
            f"The device proxy (process {self.pid}) has ended during '{operation}'; its log says why.",
            code="device-proxy.gone",
            remedy="Continue the job from its last checkpoint.",
        )


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
            python: interpreter that has torch (default: this one).
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        package_root = Path(__file__).resolve().parents[2]
        environment = dict(os.environ if env is None else env)
        environment.pop("ERGO_CHANNEL", None)
        environment |= {
            "PYTHONPATH": f"{package_root}{os.pathsep}{build.device_dir}",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # the rank side has no business here
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        command = [os.fspath(python or sys.executable), "-m", "proxy_runtime.device.zygote"]
        command += [str(theirs.fileno()), device_kind, build.id]
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
            raise DeviceProxyError(f"The zygote of the device proxies cannot be started: {error}.", code="device-proxy.start") from error
        return cls(process, ours, build.id)

    @property
    def pid(self) -> int:
        """Process id of the zygote."""
        return self._process.pid

    def fork(self, log: Path_, *, threads: int = 1, deadline_s: float = DEFAULT_DEADLINE_S) -> DeviceProxyClient:
        """Forks a device proxy.

        Args:
            log: file that its output is appended to.
            threads: threads for one operator, fixed for the life of a job.
            deadline_s: seconds, the zygote's own start included.

        Raises:
            DeviceProxyError: `device-proxy.start` if the zygote has ended, `.deadline`, `.fork`, `.build`.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs, open(log, "ab") as output:
                reply, fds = self._request({"op": "fork", "threads": threads}, [theirs.fileno(), output.fileno()], deadline_s)
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

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _request(self, request: dict[str, Any], fds: Sequence[int], deadline_s: float) -> tuple[dict[str, Any], list[int]]:
        until = time.monotonic() + deadline_s
        with self._lock:
            request["id"] = self._next_id
            self._next_id += 1
            try:
                if not self._ready:
                    self._receive(until)
                    self._ready = True
                self._frames.send(request, fds, deadline_s=max(0.1, until - time.monotonic()))
                reply, received = self._receive(until)
                while reply.get("id") != request["id"]:
                    for fd in received:
                        os.close(fd)
                    reply, received = self._receive(until)
            except FrameTimeout:
                raise DeviceProxyError(
                    f"The zygote of the device proxies did not answer within {deadline_s:g} s.", code="device-proxy.deadline"
                ) from None
            except (OSError, FrameError) as error:
                raise self._ended() from error
        if not reply.get("ok"):
            raise DeviceProxyError(_sentence(str(reply.get("error"))), code=str(reply.get("code") or "device-proxy.fork"))
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


def connect_fabric(
    proxies: Sequence[DeviceProxyClient],
    placement: Sequence[int],
    *,
    transport: Transport | str = "shm",
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> None:
    """Connects the proxies of one node to one another, each to each.

    Args:
        proxies: by index.
        placement: for each global rank the index of its proxy.
        transport: `shm`, or `tcp` over the loopback (what proxies of several nodes use).

    Raises:
        DeviceProxyError: of the first proxy that failed.
    """
    token = secrets.token_hex(16)
    peers: list[list[dict[str, Any]]] = [[] for _ in proxies]
    descriptors: list[list[int]] = [[] for _ in proxies]
    with contextlib.ExitStack() as stack:
        segment = proxies[0].hello(deadline_s=deadline_s).shm_segment_bytes if len(proxies) > 1 else 0
        for low in range(len(proxies)):
            for high in range(low + 1, len(proxies)):
                if transport == "shm":
                    fd = os.memfd_create("ergo-fabric", os.MFD_CLOEXEC)
                    stack.callback(os.close, fd)
                    os.ftruncate(fd, segment)
                    for one, other in ((low, high), (high, low)):
                        peers[one].append({"index": other, "kind": "shm"})
                        descriptors[one].append(fd)
                else:
                    address = ["127.0.0.1", _free_port()]
                    peers[low].append({"index": high, "kind": "tcp", "listen": address})
                    peers[high].append({"index": low, "kind": "tcp", "connect": address})
        with ThreadPoolExecutor(max_workers=max(1, len(proxies))) as pool:
            calls = [
                pool.submit(proxy.fabric, index, placement, token, peers[index], descriptors[index], deadline_s=deadline_s)
                for index, proxy in enumerate(proxies)
            ]
        for call in calls:
            call.result()


def _free_port() -> int:
    # Taken again by the proxy a moment later; a collision is a clear error of `connect_fabric`, which can be repeated.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _sentence(text: str) -> str:
    text = text.strip()
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."
