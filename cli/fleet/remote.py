"""What commands fetch of a job's files: logs from its nodes while it runs, files from its checkpoints otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from cli.fleet.client import Fleet

if TYPE_CHECKING:
    import httpx

    from model.control import JobView
    from model.ids import CheckpointId, NodeId

_ANSWER_S = 5.0


def http_client(fleet: Fleet) -> httpx.AsyncClient:
    """A client of the nodes' agents; whoever opens it closes it."""
    import httpx

    # trust_env off: nodes are on the fleet's own network, never behind the proxy that a user's shell may name.
    headers = {"authorization": f"Bearer {fleet.store.peer_token}"}
    return httpx.AsyncClient(headers=headers, timeout=_ANSWER_S, trust_env=False)


async def read_log(
    http: httpx.AsyncClient, nodes: Mapping[NodeId, str], view: JobView, rank: int, offset: int
) -> bytes | None:
    """A rank's log from a byte on, from the node where it runs; None where that node does not have it or answer."""
    import httpx

    address = nodes.get(view.placement[view.device_of_rank[rank]].node)
    if address is None:
        return None
    url = f"http://{address}/v1/jobs/{view.id}/{int(view.epoch)}/logs/{rank}"
    try:
        answer = await http.get(url, params={"offset": str(offset)})
    except httpx.HTTPError:
        return None
    return answer.content if answer.status_code == httpx.codes.OK else None


def newest_volume(fleet: Fleet, view: JobView) -> CheckpointId | None:
    """The checkpoint whose volume is the job's directory as it is known now; blocks."""
    if view.final is not None:
        return view.final
    # The head knows of checkpoints that the workflow has not heard of yet.
    head = fleet.store.head(view.id)
    if head is not None and (head.final or head.checkpoint) is not None:
        return head.final or head.checkpoint
    return view.checkpoints[-1].id if view.checkpoints else None


async def stored_logs(fleet: Fleet, view: JobView, ranks: Iterable[int]) -> dict[int, bytes]:
    """Logs as they are in the job's newest volume; without those that it does not have."""

    def read() -> dict[int, bytes]:
        from proxy_runtime.storage import volumes

        checkpoint = newest_volume(fleet, view)
        if checkpoint is None:
            return {}
        there = {entry.path for entry in volumes.list_files(fleet.store, view.tenant, checkpoint)}
        paths = {rank: f"private/logs/rank-{rank}.log" for rank in ranks}
        return {
            rank: volumes.read_file(fleet.store, view.tenant, checkpoint, path)
            for rank, path in paths.items()
            if path in there
        }

    return await asyncio.to_thread(read)
