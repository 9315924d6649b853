"""The device proxy's process: a control thread, and the C++ loop in the main thread.

The loop holds no GIL, so that the control thread answers while operators run. The process ends when its
control socket closes: whoever owns it is gone then, and so is the job.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from proxy_runtime.channel.ring import PROTOCOL_VERSION, build_word
from proxy_runtime.device.frames import FrameError, FrameSocket

if TYPE_CHECKING:
    from proxy_runtime.device._native import Proxy

SHM_RING_BYTES: Final = 4 << 20  # each way, between two proxies of a node
DEFAULT_DEADLINE_S: Final = 120.0

Reply = dict[str, Any]


_UNTOLD: Final = frozenset({"hello", "stats"})  # asked again and again


class Diary:
    """What a proxy does, as JSON lines on its standard error; whatever becomes of a line, the proxy goes on."""

    def __init__(self, ids: Mapping[str, Any]) -> None:
        self._ids = dict(ids)

    def note(self, event: str, *, level: str = "info", **more: Any) -> None:
        """Writes one line."""
        when = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": when, "level": level, "event": event, **self._ids, **more, "process": "device-proxy"}
        with suppress(OSError):
            os.write(sys.stderr.fileno(), json.dumps(line, separators=(",", ":")).encode() + b"\n")


class RequestError(Exception):
    """A request that this proxy cannot understand or will not carry out."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def main(
    control: FrameSocket, device_kind: str, build_id: str, threads: int, ids: Mapping[str, Any] | None = None
) -> None:
    """Runs a device proxy in this process and never returns.

    Args:
        control: the control socket, connected.
        device_kind: `cpu`, or a device type of torch.
        build_id: id of the runtime's build; rings of another are refused.
        threads: threads for one operator; the same for the life of a job, since it may change bits.
        ids: whose proxy it is, on every line of its log: job, epoch, device.
    """
    status = 1
    diary = Diary(ids or {})
    try:
        import _ergo_device
        import torch

        torch.set_num_threads(threads)
        proxy = _ergo_device.Proxy(device_kind, build_word(build_id))
        session = _Session(proxy, control, _ergo_device, build_id, diary)
        diary.note("began", pid=os.getpid(), kind=device_kind, threads=threads)
        threading.Thread(target=session.serve, name="control", daemon=True).start()
        proxy.serve()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # No interpreter shutdown: the control thread still runs, and destroying the ranks' state is the kernel's work.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class _Session:
    """Answers the requests of the control socket, one after another."""

    def __init__(self, proxy: Proxy, control: FrameSocket, native: Any, build_id: str, diary: Diary) -> None:
        self._diary = diary
        self._proxy = proxy
        self._control = control
        self._native = native
        self._build_id = build_id
        self._operations: dict[str, Callable[[Reply, list[int]], Reply]] = {
            "hello": self._hello,
            "fabric": self._fabric,
            "attach": self._attach,
            "load": self._load,
            "run": self._run,
            "stop": self._stop,
            "finish": self._finish,
            "dump": self._dump,
            "resume": self._resume,
            "stats": self._stats,
            "exit": lambda request, fds: {},
        }

    def serve(self) -> None:
        """Returns never: the process ends with the connection."""
        try:
            while (frame := self._control.receive()) is not None:
                request, fds = frame
                try:
                    self._control.send(self._noted(request, fds))
                finally:
                    for fd in fds:
                        os.close(fd)
                if request.get("op") == "exit":
                    break
        except (FrameError, OSError) as error:
            self._diary.note("the control connection broke", error=str(error))
        finally:
            os._exit(0)

    def _noted(self, request: Reply, fds: list[int]) -> Reply:
        began = time.perf_counter()
        reply = self._answer(request, fds)
        if not reply["ok"]:
            self._diary.note(str(request.get("op")), level="warning", code=reply["code"], error=reply["error"])
        elif request.get("op") not in _UNTOLD:
            self._diary.note(str(request.get("op")), ms=round((time.perf_counter() - began) * 1e3, 1))
        return reply

    def _answer(self, request: Reply, fds: list[int]) -> Reply:
        reply: Reply = {"id": request.get("id")}
        try:
            operation = self._operations.get(str(request.get("op")))
            if operation is None:
                raise RequestError(
                    "device-proxy.request", f"The device proxy knows no operation {request.get('op')!r}."
                )
            return reply | {"ok": True} | operation(request, fds)
        except (RequestError, self._native.ControlError) as error:
            return reply | {"ok": False, "code": error.code, "error": str(error)}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            message = f"The request {request.get('op')!r} is malformed: {type(error).__name__}: {error}."
            return reply | {"ok": False, "code": "device-proxy.request", "error": message}
        except Exception as error:  # a proxy that can still answer says what is wrong with it
            traceback.print_exc()
            return reply | {"ok": False, "code": "device-proxy.internal", "error": f"{type(error).__name__}: {error}"}

    def _hello(self, request: Reply, fds: list[int]) -> Reply:
        if request["protocol"] != PROTOCOL_VERSION:
            raise RequestError(
                "device-proxy.protocol",
                f"The device proxy speaks protocol version {PROTOCOL_VERSION}, its client {request['protocol']}.",
            )
        if request["build"] and request["build"] != self._build_id:
            raise RequestError(
                "device-proxy.build",
                f"The device proxy is of build {self._build_id}, its client of {request['build']}.",
            )
        return {
            "pid": os.getpid(),
            "build": self._build_id,
            "protocol": PROTOCOL_VERSION,
            "shm_segment_bytes": self._native.shm_segment_bytes(SHM_RING_BYTES),
            "board_region_bytes": self._native.BOARD_REGION_BYTES,
        }

    def _fabric(self, request: Reply, fds: list[int]) -> Reply:
        shared: list[tuple[int, int]] = []
        tcp: list[tuple[int, bool, str, int]] = []
        unused = list(fds)
        for peer in request["peers"]:
            index = int(peer["index"])
            if peer["kind"] == "shm":
                if not unused:
                    raise RequestError("device-proxy.request", f"The descriptor for peer {index} is missing.")
                shared.append((index, unused.pop(0)))
            elif peer["kind"] == "tcp":
                listen = "listen" in peer
                host, port = peer["listen"] if listen else peer["connect"]
                tcp.append((index, listen, str(host), int(port)))
            else:
                raise RequestError("device-proxy.request", f"Peers of kind {peer['kind']!r} are unknown.")
        ranks = [int(proxy) for proxy in request["ranks"]]
        board = [int(proxy) for proxy in request.get("board", ())]
        if board and not unused:
            raise RequestError("device-proxy.request", "The descriptor of the memory shared by all is missing.")
        self._proxy.connect(
            int(request["self"]),
            ranks,
            str(request["token"]),
            shared,
            tcp,
            _deadline(request),
            unused.pop(0) if board else -1,
            board,
        )
        return {}

    def _attach(self, request: Reply, fds: list[int]) -> Reply:
        if len(fds) != 1:
            raise RequestError("device-proxy.request", "An attach request needs exactly one descriptor: the ring.")
        self._proxy.attach(int(request["rank"]), fds[0], _deadline(request))
        return {}

    def _load(self, request: Reply, fds: list[int]) -> Reply:
        paths = str(request["meta"]), str(request["storages"])
        return {"counts": self._proxy.load(int(request["rank"]), *paths, _deadline(request))}

    def _run(self, request: Reply, fds: list[int]) -> Reply:
        self._proxy.run(_deadline(request))
        return {}

    def _stop(self, request: Reply, fds: list[int]) -> Reply:
        at_step = request.get("at_step")
        return self._proxy.stop(None if at_step is None else int(at_step), _deadline(request))

    def _finish(self, request: Reply, fds: list[int]) -> Reply:
        targets = {str(sequence): int(n) for sequence, n in request["targets"].items()}
        return self._proxy.finish(targets, _deadline(request))

    def _dump(self, request: Reply, fds: list[int]) -> Reply:
        paths = str(request["meta"]), str(request["storages"])
        return {"bytes": self._proxy.dump(int(request["rank"]), *paths, _deadline(request))}

    def _resume(self, request: Reply, fds: list[int]) -> Reply:
        self._proxy.resume(_deadline(request))
        return {}

    def _stats(self, request: Reply, fds: list[int]) -> Reply:
        stats = self._proxy.stats(_deadline(request))
        return stats | {"ranks": {rank: json.loads(text) for rank, text in stats["ranks"].items()}}


def _deadline(request: Reply) -> float:
    return float(request.get("deadline_s") or DEFAULT_DEADLINE_S)
