"""A client of one device proxy."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from proxy_runtime.channel.ring import PROTOCOL_VERSION
from proxy_runtime.device.errors import DeviceProxyError, sentence
from proxy_runtime.device.frames import FrameError, FrameSocket, FrameTimeout

DEFAULT_DEADLINE_S: Final = 60.0
_TRANSPORT_MARGIN_S: Final = 3.0  # beyond the deadline that the proxy itself keeps

Path_ = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class ProxyInfo:
    """What a proxy says of itself.

    Attributes:
        pid: its process.
        build: id of the build it runs.
        shm_segment_bytes: size of the memfd that joins it to another proxy of the node.
        board_region_bytes: what each proxy adds to the size of the memfd that all of a node share.
    """

    pid: int
    build: str
    shm_segment_bytes: int
    board_region_bytes: int


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
        return ProxyInfo(reply["pid"], reply["build"], reply["shm_segment_bytes"], reply["board_region_bytes"])

    def fabric(
        self,
        self_index: int,
        ranks: Sequence[int],
        token: str,
        peers: Sequence[Mapping[str, Any]],
        descriptors: Sequence[int] = (),
        board: Sequence[int] = (),
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        """Connects the proxy to its peers; returns when all are connected. See `connect_fabric`.

        Args:
            self_index: index of this proxy.
            ranks: for each global rank the index of its proxy.
            token: the job's secret.
            peers: `{"index", "kind": "shm"}` or `{"index", "kind": "tcp", "listen" | "connect": [host, port]}`.
            descriptors: segments of the shm peers, in their order; then, if there is a `board`, that of it.
            board: the proxies of this node that share one more segment, where large payloads stay.
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
            board=list(board),
        )

    def attach(self, rank: int, ring_fd: int, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """Gives the proxy a rank's ring; the descriptor stays the caller's."""
        self._call("attach", deadline_s, [ring_fd], rank=rank)

    def load(
        self, rank: int, meta: Path_, storages: Path_, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> dict[str, Any]:
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

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _call(
        self, operation: str, deadline_s: float, descriptors: Sequence[int] = (), /, **fields: Any
    ) -> dict[str, Any]:
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
            raise DeviceProxyError(f"Device proxy, {operation}: {sentence(str(reply.get('error')))}", code=code)
        return reply

    def _gone(self, operation: str) -> DeviceProxyError:
        return DeviceProxyError(
            f"The device proxy (process {self.pid}) has ended during '{operation}'; its log says why.",
            code="device-proxy.gone",
        )
