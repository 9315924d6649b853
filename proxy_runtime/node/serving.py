"""What a node's runtime adds to its peer: where proxies listen, logs, and what runs.

GET /v1/jobs                              what is here: job, epoch, step, device time
GET /v1/jobs/JOB/EPOCH/endpoints          addresses of device proxies, as soon as they are there; 404 before
GET /v1/jobs/JOB/EPOCH/logs/RANK?offset=N the log from byte N on, as far as it is now; `ergo-ended: 1` at the end

EPOCH is a number, or ``latest`` for the highest that is here.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import orjson
from starlette.concurrency import run_in_threadpool
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


def routes(runtime: LocalNodeRuntime) -> list[Route]:
    """The routes; the peer asks for the token before any of them."""
    return [
        Route("/v1/jobs", _Jobs(runtime).answer),
        Route("/v1/jobs/{job}/{epoch}/endpoints", _Endpoints(runtime).answer),
        Route("/v1/jobs/{job}/{epoch}/logs/{rank:int}", _Logs(runtime).answer),
    ]


class _Resource:
    def __init__(self, runtime: LocalNodeRuntime) -> None:
        self._runtime = runtime

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
        part = self._part(request)
        if part is not None and part.endpoints is not None:
            return Response(endpoints_json(part.endpoints), media_type="application/json")
        try:
            known = self._runtime.seen(JobId(request.path_params["job"]))
            if known > Epoch.parse(request.path_params["epoch"]):
                return _json({"code": "runtime.fenced", "epoch": int(known)}, status=409)
        except ModelError:
            pass
        return _json({"code": "runtime.unknown"}, status=404)


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
