"""Folds what many tell a cluster's scheduler into few signals: a workflow takes about five a second.

The first word after a pause goes out at once; then there is at most one signal in half a second. A word counts as told
when the signal that holds it is in the scheduler's history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import structlog
from temporalio.client import Client
from temporalio.common import WorkflowIDReusePolicy

from model.cluster import ClusterInput
from model.codec import to_json
from model.control import InboxBatch, JobClosed, JobNotice, NodeNotice
from model.names import CLUSTER_TASK_QUEUE, CLUSTER_WORKFLOW, Signal, cluster_workflow_id
from model.orders import NodeOrder, QuotaOrder

Word = JobNotice | NodeNotice | JobClosed | NodeOrder | QuotaOrder

GAP_S = 0.5
"""Seconds between two signals to one scheduler."""

BATCH_BYTES = 512 * 1024
"""About the most that one signal holds; a payload may have 2 MB."""

_log = structlog.stdlib.get_logger(__name__)


@dataclass(slots=True)
class Inbox:
    """The way into one cluster's scheduler, for one event loop. It starts the scheduler's workflow if need be."""

    client: Client
    cluster: str
    gap_s: float = GAP_S
    task_queue: str = CLUSTER_TASK_QUEUE
    _words: list[tuple[Word, asyncio.Future[None]]] = field(default_factory=list[tuple[Word, "asyncio.Future[None]"]])
    _sender: asyncio.Task[None] | None = None
    _last: float = float("-inf")

    async def tell(self, *words: Word) -> None:
        """Returns when the scheduler's workflow has all of `words` in its history.

        Raises:
            RPCError: Temporal did not take the signal; the words may be told again.
        """
        loop = asyncio.get_running_loop()
        told = [(word, loop.create_future()) for word in words]
        self._words += told
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())
        done = await asyncio.gather(*(future for _, future in told), return_exceptions=True)
        for result in done:
            if isinstance(result, BaseException):
                raise result

    async def _send_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._words:
            await asyncio.sleep(max(0.0, self._last + self.gap_s - loop.time()))
            words, self._words = self._words, []
            self._last = loop.time()
            for part in _parts(words):
                await self._send(part)

    async def _send(self, part: Sequence[tuple[Word, asyncio.Future[None]]]) -> None:
        error: BaseException | None = None
        try:
            await self._signal(_batch([word for word, _ in part]))
        except Exception as failure:
            error = failure
            _log.warning("the scheduler was not told", cluster=self.cluster, words=len(part), error=str(failure))
        except asyncio.CancelledError as cancelled:
            error = cancelled
            raise
        finally:
            for _, future in part:
                if future.done():
                    continue  # whoever told it has gone away
                if error is None:
                    future.set_result(None)
                elif isinstance(error, asyncio.CancelledError):
                    future.cancel()
                else:
                    future.set_exception(error)

    async def _signal(self, batch: InboxBatch) -> None:
        await self.client.start_workflow(
            CLUSTER_WORKFLOW,
            ClusterInput(self.cluster),
            id=cluster_workflow_id(self.cluster),
            task_queue=self.task_queue,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            start_signal=Signal.INBOX,
            start_signal_args=[batch],
            static_summary=f"Scheduler of the cluster {self.cluster}",
        )


def _batch(words: Sequence[Word]) -> InboxBatch:
    return InboxBatch(
        tuple(word for word in words if isinstance(word, JobNotice)),
        tuple(word for word in words if isinstance(word, NodeNotice)),
        tuple(word for word in words if isinstance(word, JobClosed)),
        tuple(word for word in words if isinstance(word, NodeOrder)),
        tuple(word for word in words if isinstance(word, QuotaOrder)),
    )


def _parts(
    words: Sequence[tuple[Word, asyncio.Future[None]]],
) -> Iterator[list[tuple[Word, asyncio.Future[None]]]]:
    part: list[tuple[Word, asyncio.Future[None]]] = []
    size = 0
    for item in words:
        length = len(to_json(item[0]))
        if part and size + length > BATCH_BYTES:
            yield part
            part, size = [], 0
        part.append(item)
        size += length
    if part:
        yield part
