"""What a node asks of the other nodes of a job: where their device proxies listen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import orjson
import stamina

from model.codec import from_value, to_json
from model.ids import Epoch, JobId, NodeId
from proxy_runtime.errors import ErgoError
from proxy_runtime.node.errors import NodeError, deadline, fenced
from proxy_runtime.shim.part import Endpoint

_ANSWER_S = 10.0
_WAIT_S = 2.0
_FENCED = 409


class NotYetError(ErgoError):
    """A node does not answer, or has not prepared its part yet."""

    code = "node.not-yet"


def endpoints_json(endpoints: Iterable[Endpoint]) -> bytes:
    """What a node answers."""
    return orjson.dumps([orjson.loads(to_json(endpoint)) for endpoint in endpoints])


class Peers:
    """Asks other nodes of the fleet.

    Args:
        address: gives ``host:port`` of a node's agent, or None where its record is not there or of another incarnation.
        token: bearer token of the fleet.
    """

    def __init__(self, address: Callable[[NodeId], str | None], token: str) -> None:
        self._address = address
        self._headers = {"authorization": f"Bearer {token}"}

    def endpoints(
        self, job: JobId, epoch: Epoch, nodes: Sequence[NodeId], deadline_s: float, over: Callable[[], bool]
    ) -> list[Endpoint]:
        """Where the proxies of other nodes listen, as soon as all have prepared.

        Args:
            job, epoch: whose.
            nodes: the others.
            deadline_s: for all of them.
            over: asked between tries: the part has been stopped meanwhile.

        Raises:
            NodeError: ``runtime.deadline`` names the node that did not come; ``runtime.fenced``.
        """
        if not nodes:
            return []
        limit = time.monotonic() + deadline_s
        with ThreadPoolExecutor(max_workers=min(32, len(nodes))) as pool, self._client() as client:
            asked = [pool.submit(self._of, client, job, epoch, node, limit, over) for node in nodes]
            return [endpoint for answer in asked for endpoint in answer.result()]

    def _client(self) -> httpx.Client:
        # Nodes are reached directly, whatever proxy the environment names.
        return httpx.Client(headers=self._headers, trust_env=False)

    def _of(
        self, client: httpx.Client, job: JobId, epoch: Epoch, node: NodeId, limit: float, over: Callable[[], bool]
    ) -> list[Endpoint]:
        try:
            for attempt in stamina.retry_context(
                on=(NotYetError, httpx.TransportError),
                attempts=None,
                timeout=max(0.1, limit - time.monotonic()),
                wait_initial=0.02,
                wait_max=0.5,
                wait_jitter=0.05,
            ):
                with attempt:
                    if over():
                        raise NodeError(f"Epoch {epoch} of job {job} has been stopped.", code="node.stopped")
                    return self._ask(client, job, epoch, node)
        except (NotYetError, httpx.TransportError) as error:
            raise deadline(
                f"Node {node} did not prepare its part of job {job} in epoch {epoch} in time ({error}).",
                "Look whether it is alive; the job goes on from its newest checkpoint.",
            ) from None
        raise AssertionError("unreachable")

    def _ask(self, client: httpx.Client, job: JobId, epoch: Epoch, node: NodeId) -> list[Endpoint]:
        address = self._address(node)
        if address is None:
            raise NotYetError(f"The node {node} has no record.")
        answer = client.get(f"http://{address}/v1/jobs/{job}/{int(epoch)}/endpoints?wait={_WAIT_S}", timeout=_ANSWER_S)
        if answer.status_code == _FENCED:
            raise fenced(job, epoch, Epoch(int(answer.json()["epoch"])))
        if answer.status_code != httpx.codes.OK:
            raise NotYetError(f"Node {node} answers {answer.status_code}.")
        return [from_value(Endpoint, endpoint) for endpoint in answer.json()]
