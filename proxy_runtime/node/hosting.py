"""The HTTP server of a node's agent: a thread, a free port, and a token before everything."""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

_CLOSE_S = 5.0


class PeerHost:
    """Listens from the start, so that its address is known, and answers once it serves.

    Args:
        bind: address to listen on; a free port is taken.

    Attributes:
        address: ``host:port``, as other nodes reach it.
    """

    def __init__(self, bind: str) -> None:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._socket = socket.create_server((bind, 0), family=family, backlog=256)
        port = self._socket.getsockname()[1]
        self.address = f"[{bind}]:{port}" if family is socket.AF_INET6 else f"{bind}:{port}"
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def serve(self, routes: Sequence[BaseRoute], token: str) -> None:
        """Answers from now on, in a thread of its own."""
        app = Starlette(routes=list(routes), middleware=[Middleware(_Guard, token=token)])
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=int(_CLOSE_S)
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True, name="peer"
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the server; answers that are under way get a few seconds."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(2 * _CLOSE_S)
        self._socket.close()


class _Guard:
    """Lets in whoever shows the fleet's token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            shown = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(shown, self._expected):
                answer = PlainTextResponse("The token of the fleet is missing or wrong.\n", status_code=401)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)
