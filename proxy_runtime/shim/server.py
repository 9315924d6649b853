"""The shim: a process that owns a job's processes on a node and outlives whoever started it.

One operation thread drives the job; a monitor notices exits; each client connection has a thread of its
own. The shim ends when the job has ended, and everything it owns ends with it, however it ends: containers
and the zygote carry PR_SET_PDEATHSIG, proxies leave when their control socket closes.
"""

from __future__ import annotations

import functools
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from proxy_runtime.checkpoint.store import Store
from proxy_runtime.errors import ErgoError
from proxy_runtime.process import criu_setup
from proxy_runtime.shim import aftermath, frames
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.node_job import NodeJob
from proxy_runtime.shim.spec import CutRequest, RankExit, RunError, RunSpec

MONITOR_PERIOD_S = 0.02


class Shim:
    """Serves one job on `layout.socket` until it has ended."""

    def __init__(self, spec: RunSpec, layout: RunLayout, job: NodeJob) -> None:
        self._spec = spec
        self._layout = layout
        self._job = job
        self._operations: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._watchers: list[socket.socket] = []
        self._watch_lock = threading.Lock()
        self._history: list[dict[str, Any]] = []
        self._ended = threading.Event()
        self._operating = threading.Lock()  # held while an operation changes generations
        self._result: dict[str, Any] | None = None
        self._abandoned = False  # nobody is left who would bring the files home

    # ------------------------------------------------------------------ the process

    def serve(self) -> None:
        """Blocks until the job has ended and its last event has been handed out."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            with suppress(FileNotFoundError):
                self._layout.socket.unlink()
            # The kernel limits socket paths to 107 bytes: bind by a path relative to the run directory.
            os.chdir(self._layout.root)
            listener.bind(self._layout.socket.name)
            os.chmod(self._layout.socket.name, 0o600)
            listener.listen()
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            threading.Thread(target=self._monitor, daemon=True).start()
            self._operate()
        with suppress(FileNotFoundError):
            self._layout.socket.unlink()
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
        self._publish({"event": "ended", **(self._result or {"code": 1, "sentence": "the shim was told to end."})})

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
                self._publish({"event": "exit", "rank": exit.rank, "code": exit.code, "signal": exit.signal})
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
        others = self._spec.world_size - 1
        self._job.fail()
        if others and "rank" in sentence:
            sentence += f"; the other {'rank was' if others == 1 else f'{others} ranks were'} ended"
        self.finish(code, sentence + ".")

    def _last_words(self, device: int) -> str:
        log = self._layout.epoch(self._job.epoch).proxy_log(device)
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "without a word: it was killed")

    # ------------------------------------------------------------------ clients

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._client, args=(connection,), daemon=True).start()

    def _client(self, connection: socket.socket) -> None:
        with connection:
            while True:
                try:
                    request = frames.receive(connection)
                    if request is None:
                        break
                    if request.get("op") == "watch":
                        self._watch(connection)
                        continue
                    frames.send(connection, self._answer(request))
                except (OSError, RunError):
                    break
            with self._watch_lock:
                self._watchers = [watcher for watcher in self._watchers if watcher is not connection]

    def _watch(self, connection: socket.socket) -> None:
        with self._watch_lock:
            for event in self._history:
                frames.send(connection, event)
            self._watchers.append(connection)

    def _publish(self, event: dict[str, Any]) -> None:
        with self._watch_lock:
            self._history.append(event)
            for watcher in self._watchers:
                with suppress(OSError):
                    frames.send(watcher, event)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"ok": True, **self._dispatch(request)}
        except ErgoError as error:
            return {"ok": False, "code": error.code, "error": error.message, "remedy": error.remedy}
        except Exception as error:
            return {"ok": False, "code": "run.internal", "error": f"{type(error).__name__}: {error}", "remedy": ""}

    def _dispatch(self, request: dict[str, Any]) -> dict[str, Any]:
        match request.get("op"):
            case "hello":
                return {"protocol": frames.PROTOCOL, "pid": os.getpid(), "job": self._spec.job_id}
            case "status":
                return self._job.status()
            case "start":
                self._perform(self._job.start)
                self._publish({"event": "started", **self._job.status()})
                return {}
            case "restore":
                self._perform(lambda: self._restore(str(request["checkpoint"])))
                self._publish({"event": "started", **self._job.status()})
                return {}
            case "cut":
                report = self._perform(lambda: self._job.cut(CutRequest(**request["request"])))
                self._publish({"event": "cut", "report": report.to_json(), **self._job.status()})
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
            raise RunError("the job has ended.", code="run.ended")
        self._operations.put(operation)
        while not self._ended.is_set():
            with suppress(TimeoutError):
                return future.result(timeout=0.1)
        if future.done():
            return future.result()
        raise RunError("the job has ended.", code="run.ended")


def run(root: Path) -> None:
    """Main of a shim process: `root` is the run directory with `run.json` in it."""
    from proxy_runtime import build

    data = orjson.loads((root / "run.json").read_bytes())
    spec = RunSpec.from_json(data["spec"])
    layout = RunLayout(root, spec.job_id)
    made = build.load(Path(data["build"]))

    @functools.cache
    def tool() -> criu_setup.Criu:
        found = criu_setup.find()
        criu_setup.self_test(found, made.init_binary)
        return found

    shim = Shim(spec, layout, NodeJob(spec, layout, made, tool))
    if not spec.linger:
        shim.end_with(int(data["owner"]))
    shim.serve()
