"""What a node's runtime adds to its peer: where proxies listen, logs, and what runs.

GET /v1/jobs                              what is here: job, epoch, step, device time
GET /v1/jobs/JOB/EPOCH/endpoints?wait=S   addresses of device proxies, waited for up to S seconds; 404 where not there
GET /v1/jobs/JOB/EPOCH/logs/RANK?offset=N the log from byte N on, as far as it is now; `ergo-ended: 1` at the end

EPOCH is a number, or ``latest`` for the highest that is here.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import orjson
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from model.errors import ModelError
from model.ids import Epoch, JobId
from proxy_runtime.errors import ErgoError
from proxy_runtime.node.parts import Part
from proxy_runtime.node.peers import endpoints_json
from proxy_runtime.node.runtime import LocalNodeRuntime
from proxy_runtime.shim.part import Phase

_BLOCK = 1 << 16
_LONGEST_WAIT_S = 10.0
_LOOK_S = 0.01


def routes(runtime: Callable[[], LocalNodeRuntime | None]) -> list[Route]:
    """The routes, for `proxy_runtime.storage.peer.PeerServer`, which asks for the fleet's token before any of them.

    Args:
        runtime: the node's; None as long as the agent has not claimed the node, whose address comes first.
    """
    return [
        Route("/v1/jobs", _Jobs(runtime).answer),
        Route("/v1/jobs/{job}/{epoch}/endpoints", _Endpoints(runtime).answer),
        Route("/v1/jobs/{job}/{epoch}/logs/{rank:int}", _Logs(runtime).answer),
    ]


class _Resource:
    def __init__(self, runtime: Callable[[], LocalNodeRuntime | None]) -> None:
        self._get = runtime

    @property
    def _runtime(self) -> LocalNodeRuntime:
        runtime = self._get()
        if runtime is None:
            raise HTTPException(503, "The node's agent is starting.")
        return runtime

    def _part(self, request: Request) -> Part | None:
        try:
            job, epoch = JobId(request.path_params["job"]), request.path_params["epoch"]
            if epoch == "latest":
                return next(reversed(self._runtime.parts.of_job(job)), None)
            return self._runtime.parts.get(job, Epoch.parse(epoch))
        except ModelError:
            return None


class _Jobs(_Resource):
    async def answer(self, request: Request) -> Response:
        jobs = [
            {"job": str(on.job), "epoch": int(on.epoch), "step": int(on.step), "device_ms": on.device_ms}
            for on in self._runtime.jobs()
        ]
        return _json({"node": str(self._runtime.node), "jobs": jobs})


class _Endpoints(_Resource):
    async def answer(self, request: Request) -> Response:
        limit = time.monotonic() + min(_LONGEST_WAIT_S, float(request.query_params.get("wait", "0")))
        while True:
            part = self._part(request)
            if part is not None and part.endpoints is not None:
                return Response(endpoints_json(part.endpoints), media_type="application/json")
            known = self._seen(request)
            if known is not None:
                return _json({"code": "runtime.fenced", "epoch": int(known)}, status=409)
            if time.monotonic() >= limit:
                return _json({"code": "runtime.unknown"}, status=404)
            await anyio.sleep(_LOOK_S)

    def _seen(self, request: Request) -> Epoch | None:
        """The epoch that has taken over, if one has."""
        try:
            known = self._runtime.seen(JobId(request.path_params["job"]))
            return known if known > Epoch.parse(request.path_params["epoch"]) else None
        except ModelError:
            return None


class _Logs(_Resource):
    async def answer(self, request: Request) -> Response:
        part = self._part(request)
        rank = int(request.path_params["rank"])
        if part is None or rank not in part.record.placement.ranks_at(self._runtime.node):
            return _json({"code": "runtime.unknown"}, status=404)
        try:
            offset = int(request.query_params.get("offset", "0"))
            if offset < 0:
                raise ValueError
        except ValueError:
            return _json({"code": "model.offset"}, status=400)
        ended = await run_in_threadpool(_ended, part)  # before the size: what is written after it is not missed
        path = part.client.layout.current.log(rank)
        size = path.stat().st_size if path.exists() else 0
        offset = min(offset, size)
        headers = {
            "content-length": str(size - offset),
            "ergo-epoch": str(int(part.epoch)),
            "ergo-ended": "1" if ended else "0",
        }
        return StreamingResponse(_read(path, offset, size), media_type="application/octet-stream", headers=headers)


def _ended(part: Part) -> bool:
    try:
        return part.client.status().phase is Phase.ENDED
    except ErgoError:
        return not part.client.alive


async def _read(path: Path, offset: int, end: int) -> AsyncIterator[bytes]:
    if offset == end:
        return
    async with await anyio.open_file(path, "rb") as file:
        await file.seek(offset, os.SEEK_SET)
        while offset < end and (block := await file.read(min(_BLOCK, end - offset))):
            offset += len(block)
            yield block


def _json(value: object, *, status: int = 200) -> Response:
    return Response(orjson.dumps(value), media_type="application/json", status_code=status)
