"""What every shim does with its clients: a socket in the run directory, requests answered, events handed out."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from proxy_runtime.errors import ErgoError
from proxy_runtime.shim import frames
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.spec import RunError


class SocketServer:
    """Answers requests on `layout.socket`, by `dispatch` of a subclass; each connection has a thread of its own."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._watchers: list[socket.socket] = []
        self._watch_lock = threading.Lock()
        self._history: list[dict[str, Any]] = []

    def dispatch(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers one request, or raises."""
        raise NotImplementedError

    def answered(self, request: dict[str, Any]) -> None:
        """Called after the answer to a request has been sent."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Accepts connections for the length of a block."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            with suppress(FileNotFoundError):
                self._layout.socket.unlink()
            # The kernel limits socket paths to 107 bytes: bind by a path relative to the run directory.
            os.chdir(self._layout.root)
            listener.bind(self._layout.socket.name)
            os.chmod(self._layout.socket.name, 0o600)
            listener.listen()
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            yield
        with suppress(FileNotFoundError):
            self._layout.socket.unlink()

    def publish(self, event: dict[str, Any]) -> None:
        """Hands an event to all who watch, now or later."""
        with self._watch_lock:
            self._history.append(event)
            for watcher in self._watchers:
                with suppress(OSError):
                    frames.send(watcher, event)

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
                    reply = self._answer(request)
                    try:
                        frames.send(connection, reply)
                    finally:  # whoever asked may be gone; what was asked is done
                        self.answered(request)
                except (OSError, RunError):
                    break
            with self._watch_lock:
                self._watchers = [watcher for watcher in self._watchers if watcher is not connection]

    def _watch(self, connection: socket.socket) -> None:
        with self._watch_lock:
            for event in self._history:
                frames.send(connection, event)
            self._watchers.append(connection)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"ok": True, **self.dispatch(request)}
        except ErgoError as error:
            return {"ok": False, "code": error.code, "error": error.message, "remedy": error.remedy}
        except Exception as error:
            return {"ok": False, "code": "run.internal", "error": f"{type(error).__name__}: {error}", "remedy": ""}
