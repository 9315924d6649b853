"""What has become of a job's workflow, asked of Temporal from threads that have no event loop."""

from __future__ import annotations

import asyncio

from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from model.ids import JobId

_ANSWER_S = 5.0

_CLOSED = {
    WorkflowExecutionStatus.COMPLETED: "completed",
    WorkflowExecutionStatus.FAILED: "failed",
    WorkflowExecutionStatus.CANCELED: "cancelled",
    WorkflowExecutionStatus.TERMINATED: "terminated",
    WorkflowExecutionStatus.TIMED_OUT: "timed out",
}


class TemporalFates:
    """Implements `activities.node.JobFates`. Made in the event loop that the client belongs to."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()

    def closed(self, job: JobId) -> str | None:
        """How the newest run of the job's workflow has closed; None while it goes on, or where nobody answers.

        Continue-as-new and reset give the job a newer run, which goes on.
        """
        future = asyncio.run_coroutine_threadsafe(self.ask(job), self._loop)
        try:
            return future.result(_ANSWER_S * 2)
        except TimeoutError:
            future.cancel()
            return None

    async def ask(self, job: JobId, *, first_run: str = "") -> str | None:
        """The same, in the client's event loop.

        Args:
            job: whose workflow.
            first_run: first execution run of the workflow that was meant, where it is known: one that goes on with the
                same id and another first run is another job.
        """
        try:
            async with asyncio.timeout(_ANSWER_S):
                description = await self._client.get_workflow_handle(job).describe()
        except RPCError as error:
            return "removed" if _no_such_workflow(error) else None
        except TimeoutError:
            return None
        running = description.raw_description.workflow_execution_info.first_run_id
        if first_run and running and running != first_run:
            return "replaced by another job of the same id"
        return _CLOSED.get(description.status) if description.status is not None else None


def _no_such_workflow(error: RPCError) -> bool:
    """A namespace that is not there says nothing about the job: somebody's configuration is wrong."""
    return error.status is RPCStatusCode.NOT_FOUND and "namespace" not in error.message.lower()
