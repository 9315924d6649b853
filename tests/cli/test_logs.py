"""`ergo logs`: from nodes while a job runs, from its volume afterwards, each line once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from model.ids import Epoch
from model.job_state import JobPhase
from tests.cli.conftest import DEADLINE_S
from tests.cli.samples import NODE_1, NODE_2, device, node, view


@dataclass
class Peer:
    """The part of a node's peer that serves logs, as design record 0002 says."""

    token: str
    address: str = ""
    logs: dict[str, bytes] = field(default_factory=dict)

    def answer(self, path: str, authorization: str | None) -> tuple[int, bytes]:
        if authorization != f"Bearer {self.token}":
            return 401, b""
        parts = urlsplit(path)
        log = self.logs.get(parts.path)
        if log is None:
            return 404, b"{}"
        return 200, log[int(parse_qs(parts.query)["offset"][0]) :]


@pytest.fixture
def peer(store) -> Iterator[Peer]:
    made = Peer(store.peer_token)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = made.answer(self.path, self.headers.get("authorization"))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.address = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
async def running(job, store, peer):
    """A job of two ranks on node-1, in epoch 2."""
    store.claim_node(node(NODE_1).model_copy(update={"address": peer.address}))
    handle = await job("char-gpt", ranks=2)
    await handle.signal("become", view(handle.id))
    for rank in range(2):
        peer.logs[f"/v1/jobs/{handle.id}/2/logs/{rank}"] = b"step 1\nstep 2 of rank %d\n" % rank
    return handle


async def test_of_a_running_job(ergo, running):
    done = await ergo("logs", running.id)
    assert done.out == "[rank0] step 1\n[rank0] step 2 of rank 0\n[rank1] step 1\n[rank1] step 2 of rank 1\n"
    assert done.err == ""
    assert (await ergo("logs", running.id, "--rank", "1")).out == "step 1\nstep 2 of rank 1\n"


async def test_a_rank_that_there_is_not(ergo, running):
    done = await ergo("logs", running.id, "--rank", "2", code=1)
    assert done.err == f"ergo: Job {running.id} has no rank 2. Its ranks are 0 to 1.\n"


async def test_a_proxy_of_the_shell_is_not_asked_for_nodes(ergo, running):
    ergo.env["http_proxy"] = ergo.env["HTTP_PROXY"] = "http://127.0.0.1:1"
    assert "step 2 of rank 0" in (await ergo("logs", running.id)).out


async def test_following_over_a_move(ergo, running, store, peer):
    process = await ergo.start("logs", "-f", "--rank", "0", running.id)
    first, second = f"/v1/jobs/{running.id}/2/logs/0", f"/v1/jobs/{running.id}/3/logs/0"
    async with asyncio.timeout(DEADLINE_S):
        assert await process.stdout.readline() == b"step 1\n"
        assert await process.stdout.readline() == b"step 2 of rank 0\n"
        # Moved, and back at a checkpoint: the log begins as before, is shorter for a moment, then goes on.
        peer.logs[second] = b"step 1\nst"
        del peer.logs[first]
        at = store.claim_node(node(NODE_2).model_copy(update={"address": peer.address})).node
        moved = view(running.id, epoch=Epoch(3), placement=(device(at, 0), device(at, 1)))
        await running.signal("become", moved)
        peer.logs[second] = b"step 1\nstep 2 of rank 0\nstep 3\n"
        assert await process.stdout.readline() == b"step 3\n"
        done = view(running.id, phase=JobPhase.COMPLETED, placement=(), width=0, checkpoints=())
        await running.signal("become", done)
        out, _ = await process.communicate()
    assert process.returncode == 0
    assert out == b""


async def test_following_a_job_that_waits(ergo, job, store):
    handle = await job("queued")
    process = await ergo.start("logs", "-f", handle.id)
    async with asyncio.timeout(DEADLINE_S):
        assert b"is queued: it needs 2 devices" in await process.stderr.readline()
        await handle.signal("become", view(handle.id, phase=JobPhase.CANCELLED, placement=(), width=0, checkpoints=()))
        await process.communicate()
    assert process.returncode == 0


async def test_of_a_job_that_has_written_nothing(ergo, job, store):
    handle = await job("queued")
    done = await ergo("logs", handle.id)
    assert done.out == ""
    assert "has written nothing that is kept yet" in done.err


async def test_of_a_script_that_starts_its_own_ranks(ergo, running, peer):
    await running.signal("become", view(running.id, pack="node", ranks=1))
    peer.logs[f"/v1/jobs/{running.id}/2/logs/0"] = b"of both\n"
    assert (await ergo("logs", running.id)).out == "of both\n"
    assert (await ergo("logs", running.id, "--rank", "0")).out == "of both\n"
    refused = await ergo("logs", running.id, "--rank", "1", code=1)
    assert "starts its own ranks: their output is one log" in refused.err
