"""Talking to a shim: starting one, and the operations on its job."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from proxy_runtime.home import ergo_home
from proxy_runtime.shim import frames
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.spec import CutReport, CutRequest, RunError, RunSpec

START_DEADLINE_S = 30.0


class ShimClient:
    """One connection to a shim. Calls may come from several threads; each is answered in turn."""

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout
        self._lock = threading.Lock()
        self._connection = connect(layout)
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def spawn(cls, spec: RunSpec, build_root: Path) -> ShimClient:
        """Starts a shim in a session of its own; unless the job lingers, it ends when this process does.

        Raises:
            RunError: the shim ended at once; its log is quoted.
        """
        layout = RunLayout.of(spec.job_id)
        process = spawn(layout, spec, build_root)
        client = cls(layout)
        client._process = process
        return client

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Raises RunError with the shim's own code and sentence, or `run.shim-gone`."""
        with self._lock:
            try:
                frames.send(self._connection, {"op": op, **arguments})
                reply = frames.receive(self._connection)
            except OSError:
                reply = None
        if reply is None:
            raise RunError(
                "the shim of the job has ended or was killed; everything it owned has ended with it.",
                code="run.shim-gone",
            )
        if not reply["ok"]:
            raise RunError(reply["error"], code=reply["code"], remedy=reply["remedy"])
        return reply

    def start(self) -> None:
        self.call("start")

    def restore(self, checkpoint: str) -> None:
        self.call("restore", checkpoint=checkpoint)

    def status(self) -> dict[str, Any]:
        return self.call("status")

    def cut(self, request: CutRequest) -> CutReport:
        import dataclasses

        reply = self.call("cut", request=dataclasses.asdict(request))
        reply.pop("ok")
        return CutReport(**reply)

    def end(self, code: int = 130, sentence: str = "the job was ended.") -> None:
        self.call("end", code=code, sentence=sentence)

    def events(self) -> Iterator[dict[str, Any]]:
        """All events of the job, from its start to `ended`, on a connection of its own."""
        with connect(self.layout) as connection:
            frames.send(connection, {"op": "watch"})
            while True:
                try:
                    event = frames.receive(connection)
                except OSError:
                    event = None
                if event is None:
                    return
                yield event
                if event["event"] == "ended":
                    return

    def result(self) -> dict[str, Any] | None:
        """The job's result as the shim left it on disk."""
        path = self.layout.root / "result.json"
        return orjson.loads(path.read_bytes()) if path.exists() else None

    def close(self) -> None:
        """Lets go of the connection; the job goes on."""
        self._connection.close()

    def kill(self) -> None:
        """Ends the shim this client started, and with it everything of the job, at once.

        The kernel ends what it owns: containers, zygote and proxies die with it.
        """
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.close()

    def wait_gone(self, timeout_s: float) -> None:
        """Waits until the shim's process has ended, if this client started it."""
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise RunError("the shim of the ended job does not end.", code="run.deadline") from None


def spawn(layout: RunLayout, spec: RunSpec, build_root: Path, **more: str) -> subprocess.Popen[bytes]:
    """Starts a shim in a session of its own and waits until it answers.

    Args:
        layout: its run directory, made if need be.
        spec: the job.
        build_root: `Build.root` of the build to run with.
        more: for its `run.json`.

    Raises:
        RunError: the shim ended at once (its log is quoted), or did not answer in time.
    """
    layout.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    owner = {"spec": spec.to_json(), "build": str(build_root), "owner": os.getpid(), **more}
    layout.spec.write_bytes(orjson.dumps(owner))
    with open(layout.shim_log, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "proxy_runtime.shim", str(layout.root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
    limit = time.monotonic() + START_DEADLINE_S
    try:
        while True:
            try:
                connect(layout).close()
                return process
            except (FileNotFoundError, ConnectionRefusedError):
                if process.poll() is not None:
                    raise RunError(_last_words(layout), code="run.shim-failed") from None
                if time.monotonic() > limit:
                    raise RunError("the shim did not answer in time.", code="run.deadline") from None
                time.sleep(0.01)
    except BaseException:
        process.kill()
        process.wait()
        raise


def running_jobs() -> list[RunLayout]:
    """Run directories on this machine whose shim answers."""
    found: list[RunLayout] = []
    for path in sorted((ergo_home() / "runs").glob("*/shim.sock")):
        layout = RunLayout(path.parent, path.parent.name)
        try:
            connect(layout).close()
        except OSError:
            continue
        found.append(layout)
    return found


def connect(layout: RunLayout) -> socket.socket:
    """A connection to the shim. Raises OSError when there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(layout.root, os.O_PATH | os.O_DIRECTORY)
    try:  # the path may be longer than a socket address takes
        connection.connect(f"/proc/self/fd/{directory}/{layout.socket.name}")
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(directory)
    return connection


def _last_words(layout: RunLayout) -> str:
    try:
        lines = layout.shim_log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "the shim ended without a word."
