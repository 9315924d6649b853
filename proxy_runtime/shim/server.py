"""The shim: a process that owns a job's processes on a node and outlives whoever started it.

One operation thread drives the job; a monitor notices exits; each client connection has a thread of its
own. The shim ends when the job has ended, and everything it owns ends with it, however it ends: containers
and the zygote carry PR_SET_PDEATHSIG, proxies leave when their control socket closes.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from proxy_runtime.checkpoint.store import Store
from proxy_runtime.shim import aftermath, frames
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.node_job import NodeJob
from proxy_runtime.shim.socket_server import SocketServer
from proxy_runtime.shim.spec import CutRequest, RankExit, RunError, RunSpec

MONITOR_PERIOD_S = 0.02


class Shim(SocketServer):
    """Serves one job on `layout.socket` until it has ended."""

    def __init__(self, spec: RunSpec, layout: RunLayout, job: NodeJob) -> None:
        super().__init__(layout)
        self._spec = spec
        self._job = job
        self._operations: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._ended = threading.Event()
        self._operating = threading.Lock()  # held while an operation changes generations
        self._result: dict[str, Any] | None = None
        self._abandoned = False  # nobody is left who would bring the files home

    # ------------------------------------------------------------------ the process

    def serve(self) -> None:
        """Blocks until the job has ended and its last event has been handed out."""
        with self.listening():
            threading.Thread(target=self._monitor, daemon=True).start()
            self._operate()
        if self._abandoned:
            aftermath.bring_home(self._layout, self._spec)
            aftermath.clean(self._layout)

    def _operate(self) -> None:
        """Runs operations in the main thread, so that what it starts is never orphaned by a thread's end."""
        while not self._ended.is_set():
            with suppress(queue.Empty):
                operation = self._operations.get(timeout=0.1)
                if operation is None:
                    break
                with self._operating:
                    operation()
        self._job.end()
        self.publish({"event": "ended", **(self._result or {"code": 1, "sentence": "the shim was told to end."})})

    def finish(self, code: int, sentence: str = "") -> None:
        """Records the job's result; the main thread then ends everything."""
        if self._result is None:
            self._result = {"code": code, "sentence": sentence}
            temporary = self._layout.root / "result.json.tmp"
            temporary.write_bytes(orjson.dumps(self._result))
            temporary.rename(self._layout.root / "result.json")
        self._ended.set()
        self._operations.put(None)

    def end_with(self, owner: int) -> None:
        """Ends the job when the process that started it is gone."""

        def watch() -> None:
            with suppress(ProcessLookupError):
                pidfd = os.pidfd_open(owner)
                select.select([pidfd], [], [])
            self._abandoned = True
            self.finish(130, "the command that started the job is gone.")

        threading.Thread(target=watch, daemon=True).start()

    # ------------------------------------------------------------------ the monitor

    def _monitor(self) -> None:
        while not self._ended.is_set():
            for exit in self._job.poll():
                self.publish({"event": "exit", "rank": exit.rank, "code": exit.code, "signal": exit.signal})
                if exit.code != 0 and not self._ended.is_set():
                    self._fail_with(exit)
                    return
            if self._job.finished:
                self.finish(0)
                return
            dead = self._job.dead_proxy()
            if dead is not None and not self._operating.locked():
                self._fail(1, f"device proxy {dead} died ({self._last_words(dead)})")
                return
            time.sleep(MONITOR_PERIOD_S)

    def _fail_with(self, exit: RankExit) -> None:
        code = 128 + exit.signal if exit.signal else exit.code
        self._fail(code, exit.sentence)

    def _fail(self, code: int, sentence: str) -> None:
        others = self._spec.processes - 1
        self._job.fail()
        if others and "rank" in sentence:
            sentence += f"; the other {'rank was' if others == 1 else f'{others} ranks were'} ended"
        self.finish(code, sentence + ".")

    def _last_words(self, device: int) -> str:
        log = self._layout.current.proxy_log(device)
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        # What it did last, in its log's own format, is no reason to die.
        return "without a word: it was killed" if not last or _is_log_event(last) else last

    # ------------------------------------------------------------------ clients

    def dispatch(self, request: dict[str, Any]) -> dict[str, Any]:
        match request.get("op"):
            case "hello":
                return {"protocol": frames.PROTOCOL, "pid": os.getpid(), "job": self._spec.job_id}
            case "status":
                return self._job.status()
            case "start":
                self._perform(self._job.start)
                self.publish({"event": "started", **self._job.status()})
                return {}
            case "restore":
                self._perform(lambda: self._restore(str(request["checkpoint"])))
                self.publish({"event": "started", **self._job.status()})
                return {}
            case "cut":
                report = self._perform(lambda: self._job.cut(CutRequest(**request["request"])))
                self.publish({"event": "cut", "report": report.to_json(), **self._job.status()})
                if report.outcome == "stopped":
                    # Not 0: whoever waits for the job's work must not take it for done (EX_TEMPFAIL).
                    self.finish(75, f"the job is suspended in checkpoint {report.checkpoint}.")
                return report.to_json()
            case "end":
                self.finish(int(request.get("code", 130)), str(request.get("sentence", "the job was ended.")))
                return {}
            case other:
                raise RunError(f"the shim does not know the operation {other!r}.", code="run.bad-operation")

    def _restore(self, reference: str) -> None:
        self._job.restore(Store.open(Path(self._spec.checkpoint_dir), create=False).read(reference, self._spec.job_id))

    def _perform(self, call: Callable[[], Any]) -> Any:
        """Runs a call in the operation thread and returns what it returns or raises."""
        future: Future[Any] = Future()

        def operation() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        if self._ended.is_set():
            raise self._over()
        self._operations.put(operation)
        while not self._ended.is_set():
            with suppress(TimeoutError):
                return future.result(timeout=0.1)
        if future.done():
            return future.result()
        raise self._over()

    def _over(self) -> RunError:
        why = (self._result or {}).get("sentence")
        return RunError(f"the job has ended: {why}" if why else "the job has ended.", code="run.ended")


def _is_log_event(line: str) -> bool:
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return isinstance(event, dict) and event.get("level") == "info"
