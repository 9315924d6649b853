"""The shim of a part: serves it on its socket until it is ended, whoever has started it and whatever became of that."""

from __future__ import annotations

import os
import threading
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import orjson

from model.codec import from_value, to_json
from proxy_runtime.shim import frames
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.part import Endpoint
from proxy_runtime.shim.parts.job import PartJob
from proxy_runtime.shim.socket_server import SocketServer
from proxy_runtime.shim.spec import RunError

MONITOR_PERIOD_S = 0.02


class PartShim(SocketServer):
    """Serves one part."""

    def __init__(self, layout: RunLayout, job: PartJob) -> None:
        super().__init__(layout)
        self._job = job
        self._done = threading.Event()
        job.on_event = self._note

    def serve(self) -> None:
        """Blocks until the part has been ended."""
        with self.listening():
            self._job.warm()
            while not self._done.wait(MONITOR_PERIOD_S):
                try:
                    self._job.poll()
                except Exception:  # the job must outlive any fault of ours
                    with suppress(OSError):
                        traceback.print_exc()

    def answered(self, request: dict[str, Any]) -> None:
        if request.get("op") == "end":
            self._done.set()

    def dispatch(self, request: dict[str, Any]) -> dict[str, Any]:
        job, cuts = self._job, self._job.cuts
        limit = float(request.get("deadline_s", 60.0))
        match request.get("op"):
            case "hello":
                return {"protocol": frames.PROTOCOL, "pid": os.getpid(), "job": job.spec.job_id}
            case "status":
                return {"status": plain(job.status())}
            case "wait":
                return {"result": plain_or_none(job.wait(float(request["timeout_s"])))}
            case "prepare":
                found = job.prepare(str(request["host"]), fresh=bool(request["fresh"]), deadline_s=limit)
                return {"endpoints": [plain(endpoint) for endpoint in found]}
            case "connect":
                endpoints = [from_value(Endpoint, endpoint) for endpoint in request["endpoints"]]
                job.connect(endpoints, str(request["token"]), deadline_s=limit)
                return {}
            case "restore":
                return {"result": plain(job.restore(str(request["checkpoint"]), deadline_s=limit))}
            case "go":
                job.go()
                return {}
            case "stop_queues":
                at_step = request.get("at_step")
                return {
                    "result": plain(
                        cuts.stop_queues(
                            int(request["cut"]),
                            at_step=None if at_step is None else int(at_step),
                            prefer_step_s=float(request.get("prefer_step_s", 0.0)),
                            deadline_s=float(request["phase_s"]),
                        )
                    )
                }
            case "finish":
                targets = {str(name): int(count) for name, count in request["targets"].items()}
                return {"result": plain(cuts.finish(int(request["cut"]), targets, deadline_s=limit))}
            case "write":
                return {"result": plain(cuts.write(int(request["cut"]), request["kind"], deadline_s=limit))}
            case "resume":
                cuts.resume(int(request["cut"]))
                return {}
            case "end":
                return {"result": plain(job.end(float(request.get("grace_s", 0.0))))}
            case other:
                raise RunError(f"the shim does not know the operation {other!r}.", code="run.bad-operation")

    def _note(self, event: dict[str, Any]) -> None:
        self.publish(event)
        when = datetime.fromtimestamp(event["at_ms"] / 1e3, UTC).isoformat(timespec="milliseconds")
        told = {"time": when.replace("+00:00", "Z"), "level": "info", "job": self._job.spec.job_id, **event}
        line = orjson.dumps({**told, "node": self._job.part.node, "process": "shim"})
        with suppress(OSError), open(self._layout.events, "ab") as file:  # a full disk ends no job
            file.write(line + b"\n")


def plain(value: object) -> Any:
    """A shape as plain JSON values."""
    return orjson.loads(to_json(value))


def plain_or_none(value: object | None) -> Any:
    """The same of what may not be there yet."""
    return None if value is None else plain(value)
