"""What a node serves to other nodes and to commands, over HTTP with the fleet's token.

GET /v1/packs/TENANT/PACK                     a pack of this node's store, with ranges
GET /v1/manifests/TENANT/JOB/CHECKPOINT       a manifest of this node's store

The node's runtime mounts further routes (endpoints, logs, jobs).
"""

from __future__ import annotations

import hmac
import re
import socket
import threading
from collections.abc import Callable, Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from model.errors import ModelError
from model.ids import TenantId
from proxy_runtime.checkpoint import Store
from proxy_runtime.errors import ErgoError
from proxy_runtime.storage.errors import StorageError, from_os_error

_PACK = re.compile(r"[0-9a-f]{40}")
_START_S = 30.0


class PeerServer:
    """A node's HTTP server, in a thread of its own.

    Args:
        token: what callers must show.
        stores: a tenant's share of the node's chunk store.
        routes: further ones; they are asked for the token too.
        host: address to bind.
        port: 0 for a free one.
    """

    def __init__(
        self,
        token: str,
        stores: Callable[[TenantId], Store],
        *,
        routes: Sequence[BaseRoute] = (),
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._stores = stores
        self._host, self._port = host, port
        own = [
            Route("/v1/packs/{tenant}/{pack}", self._pack),
            Route("/v1/manifests/{tenant}/{job}/{checkpoint}", self._manifest),
        ]
        self._app = Starlette(routes=[*own, *routes], middleware=[Middleware(_Token, token=token)])
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Binds and serves.

        Returns:
            ``host:port``.

        Raises:
            StorageError: the address cannot be bound, or the server does not start.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server((self._host, self._port), family=family, backlog=512)
        except OSError as error:
            raise from_os_error(error, "serve other nodes", f"{self._host}:{self._port}") from error
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2, ws="none"
        )
        self._server = server = uvicorn.Server(config)
        self._thread = threading.Thread(target=server.run, args=([listener],), name="ergo-peer", daemon=True)
        started = threading.Event()
        startup = server.startup

        async def announced(sockets: list[socket.socket] | None = None) -> None:
            await startup(sockets)
            started.set()

        server.startup = announced
        self._thread.start()
        if not started.wait(_START_S):
            raise StorageError(f"The server on {self.address} did not start in {_START_S:g} s.")
        return self.address

    @property
    def address(self) -> str:
        """``host:port``; the port is known after :meth:`start`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    def stop(self) -> None:
        """Ends the server; answers that take longer than two seconds are cut off."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(10.0)

    async def _pack(self, request: Request) -> Response:
        pack = request.path_params["pack"]
        try:
            store = await run_in_threadpool(self._stores, TenantId(request.path_params["tenant"]))
        except (ModelError, ErgoError) as error:
            return _error(error, 404)
        if not _PACK.fullmatch(pack) or not store.exchange.has(pack):
            return JSONResponse({"code": "storage.missing"}, status_code=404)
        return _PackResponse(store.exchange.path(pack), media_type="application/octet-stream")

    async def _manifest(self, request: Request) -> Response:
        params = request.path_params
        try:
            store = await run_in_threadpool(self._stores, TenantId(params["tenant"]))
            reader = await run_in_threadpool(store.read, params["checkpoint"], params["job"])
        except (ModelError, ErgoError) as error:
            return _error(error, 404)
        return Response(reader.manifest.model_dump_json(), media_type="application/json")


class _PackResponse(FileResponse):
    chunk_size = 1 << 20  # every piece is a hop to a thread and back


class _Token:
    """Refuses whoever does not show the token; plain ASGI, so that big answers are not copied."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            shown = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(shown, self._expected):
                await JSONResponse({"code": "storage.permission"}, status_code=401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _error(error: ModelError | ErgoError, status: int) -> Response:
    return JSONResponse({"code": error.code, "message": error.message}, status_code=status)
