"""The shim of a part: serves it on its socket until it is ended, whoever has started it and whatever became of that.

The part of a later epoch that keeps the processes is served beside it: processes cannot change their shim.
"""

from __future__ import annotations

import os
import threading
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import orjson

from model.codec import from_value, to_json
from proxy_runtime.shim import frames
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.part import Endpoint
from proxy_runtime.shim.parts.job import PartJob
from proxy_runtime.shim.socket_server import SocketServer
from proxy_runtime.shim.spec import RunError, RunSpec

MONITOR_PERIOD_S = 0.02


class PartShim(SocketServer):
    """Serves the part of one epoch, and those of later ones that keep its processes."""

    def __init__(self, layout: RunLayout, job: PartJob) -> None:
        super().__init__(layout)
        self._lock = threading.Lock()
        self._jobs: dict[int, PartJob] = {}
        self._ended: set[int] = set()
        self._done = threading.Event()
        self._add(job)

    def serve(self) -> None:
        """Blocks until all parts have been ended."""
        with self.listening():
            self._job(None).warm()
            while not self._done.wait(MONITOR_PERIOD_S):
                for job in list(self._jobs.values()):
                    try:
                        job.poll()
                    except Exception:  # the job must outlive any fault of ours
                        with suppress(OSError):
                            traceback.print_exc()

    def answered(self, request: dict[str, Any]) -> None:
        if request.get("op") == "end" and not self._left:
            self._done.set()

    def dispatch(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("op") == "end":
            return self._end(request.get("epoch"), float(request.get("grace_s", 0.0)))
        if request.get("op") == "succeed":
            self._succeed(RunSpec.from_json(request["spec"]), int(request["before"]))
            return {}
        job = self._job(request.get("epoch"))
        cuts = job.cuts
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
            case "keep":
                return {"result": plain(job.keep(int(request["cut"]), request.get("checkpoint"), deadline_s=limit))}
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
                ranks = request.get("ranks", ())
                done = cuts.write(int(request["cut"]), request["kind"], ranks=ranks, deadline_s=limit)
                return {"result": plain(done)}
            case "resume":
                cuts.resume(int(request["cut"]))
                return {}
            case other:
                raise RunError(f"the shim does not know the operation {other!r}.", code="run.bad-operation")

    @property
    def _left(self) -> set[int]:
        with self._lock:
            return set(self._jobs) - self._ended

    def _job(self, epoch: int | None) -> PartJob:
        """The part of an epoch; of the newest one for None."""
        with self._lock:
            job = self._jobs.get(max(self._jobs) if epoch is None else epoch)
        if job is None:
            raise RunError(f"the shim has no part of epoch {epoch}.", code="run.ended")
        return job

    def _add(self, job: PartJob) -> None:
        job.on_event = partial(self._note, job)
        self._jobs[job.part.epoch] = job

    def _succeed(self, spec: RunSpec, before: int) -> None:
        old = self._job(before)
        with self._lock:
            if spec.part is None or spec.part.epoch in self._jobs:
                return
            self._add(old.successor(spec))

    def _end(self, epoch: int | None, grace_s: float) -> dict[str, Any]:
        """Ends the part of an epoch, or for None of all, oldest first."""
        meant = sorted(self._jobs) if epoch is None else [epoch]
        results = [self._job(each).end(grace_s) for each in meant]
        with self._lock:
            self._ended.update(meant)
        return {"result": plain(results[-1]), "stays": bool(self._left)}

    def _note(self, job: PartJob, event: dict[str, Any]) -> None:
        self.publish(event)
        when = datetime.fromtimestamp(event["at_ms"] / 1e3, UTC).isoformat(timespec="milliseconds")
        told = {"time": when.replace("+00:00", "Z"), "level": "info", "job": job.spec.job_id, **event}
        line = orjson.dumps({**told, "node": job.part.node, "process": "shim"})
        with suppress(OSError), open(self._layout.events, "ab") as file:  # a full disk ends no job
            file.write(line + b"\n")


def plain(value: object) -> Any:
    """A shape as plain JSON values."""
    return orjson.loads(to_json(value))


def plain_or_none(value: object | None) -> Any:
    """The same of what may not be there yet."""
    return None if value is None else plain(value)
