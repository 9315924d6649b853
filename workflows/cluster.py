"""The scheduler of a cluster: a workflow that holds the name of its state, what it has not told yet, and nothing else.

Jobs and the observer put notices into its inbox. A tick hands them to `decide`, a local activity: it reads the
snapshot that the digest names, folds the notices in, plans and writes the next snapshot. What it returns (the digest
and the directives) is recorded in the history before anybody is told. A worker that dies in between decides again
or tells again, and both are harmless: nobody names the first snapshot, and a job knows a decision that it has seen.
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from model.cluster import ClusterInput, ClusterView, DecideInput, DecideResult, DeliverPlanInput, DeliverPlanResult
    from model.control import AddressedDirective, InboxBatch, JobClosed
    from model.names import CLUSTER_WORKFLOW, Activity, Query, Signal
    from scheduling.ledger import fold

BATCHES_AT_ONCE = 64
"""Most batches that one tick folds in: bounds the time of a `decide`."""

DIRECTIVES_AT_ONCE = 100
"""Most directives of one `deliver_plan`: a directive of a large job is tens of kilobytes, a payload at most 2 MB."""

# For ever: a store that is away, or a policy that fails, stops decisions, and no job.
_PATIENT = RetryPolicy(
    initial_interval=timedelta(seconds=0.5), backoff_coefficient=2.0, maximum_interval=timedelta(seconds=15)
)


@workflow.defn(name=CLUSTER_WORKFLOW)
class ClusterScheduler:
    """One per cluster, for ever; it continues as new whenever the server suggests it, or on the signal ``renew``."""

    @workflow.init
    def __init__(self, input: ClusterInput) -> None:
        self._cluster = input.cluster
        self._digest = input.digest
        self._tick = input.tick
        self._inbox = list(input.inbox)
        self._undelivered = list(input.undelivered)
        self._wake_at: datetime | None = input.wake_at
        self._renew = False
        self._summary = "has not decided yet"

    @workflow.run
    async def run(self, input: ClusterInput) -> None:
        """Ticks until it continues as new."""
        workflow.set_current_details(self._details())
        await self._deliver()
        while True:
            await self._wait()
            # Before anything else: a run that is asked to renew at once, again and again, would never decide.
            if self._inbox or self._due():
                await self._decide()
                await self._deliver()
            if self._renew or workflow.info().is_continue_as_new_suggested():
                await workflow.wait_condition(workflow.all_handlers_finished)
                workflow.continue_as_new(self._next_input())

    @workflow.signal(name=Signal.INBOX)
    def inbox(self, batch: InboxBatch) -> None:
        """Takes in what jobs and the observer have told in about half a second."""
        self._inbox.append(batch)

    @workflow.signal(name=Signal.RENEW)
    def renew(self) -> None:
        """Continues as new after the tick that is under way."""
        self._renew = True

    @workflow.query(name=Query.SHOW)
    def show(self) -> ClusterView:
        """Where it stands; the snapshot that `digest` names holds the rest."""
        return ClusterView(
            self._cluster, self._digest, self._tick, len(self._inbox), len(self._undelivered), self._summary
        )

    @workflow.query(name=Query.EXPLAIN)
    def explain(self) -> str:
        """What it did last, as a sentence."""
        return f"Tick {self._tick}: {self._summary}."

    async def _wait(self) -> None:
        """Until something comes in, or it is time to look again."""
        if self._due() or self._renew:
            return
        rest = (self._wake_at - workflow.now()).total_seconds() if self._wake_at else 0.0
        try:
            await workflow.wait_condition(
                lambda: bool(self._inbox) or self._renew, timeout=rest, timeout_summary="look again"
            )
        except asyncio.TimeoutError:  # noqa: UP041 - the SDK raises this one on 3.10 as well
            pass

    def _due(self) -> bool:
        return self._wake_at is None or workflow.now() >= self._wake_at

    async def _decide(self) -> None:
        batches = self._inbox[:BATCHES_AT_ONCE]
        now = workflow.now()
        result = await workflow.execute_local_activity(
            Activity.DECIDE,
            DecideInput(self._cluster, self._tick + 1, self._digest, tuple(batches), now),
            result_type=DecideResult,
            start_to_close_timeout=timedelta(seconds=60),
            retry_policy=_PATIENT,
            summary=f"tick {self._tick + 1}",
        )
        # Signals that came in meanwhile are at the end of the inbox.
        del self._inbox[: len(batches)]
        self._tick += 1
        self._digest = result.digest
        self._undelivered += result.directives
        self._wake_at = now + timedelta(seconds=result.wake_s)
        self._summary = result.summary
        workflow.set_current_details(self._details())

    async def _deliver(self) -> None:
        while self._undelivered:
            part = self._undelivered[:DIRECTIVES_AT_ONCE]
            result = await workflow.execute_activity(
                Activity.DELIVER_PLAN,
                DeliverPlanInput(self._cluster, tuple(part)),
                result_type=DeliverPlanResult,
                start_to_close_timeout=timedelta(seconds=120),
                heartbeat_timeout=timedelta(seconds=20),
                retry_policy=_PATIENT,
                summary=_told(part),
            )
            del self._undelivered[: len(part)]
            runs = {item.job: item.workflow_run for item in part}
            if result.gone:
                self._inbox.append(InboxBatch(closed=tuple(JobClosed(job, runs[job], "gone") for job in result.gone)))

    def _next_input(self) -> ClusterInput:
        # Folded, so that a scheduler that could not decide for a while still fits into an input.
        inbox = (fold(self._inbox),) if self._inbox else ()
        return ClusterInput(self._cluster, self._digest, self._tick, inbox, tuple(self._undelivered), self._wake_at)

    def _details(self) -> str:
        return (
            f"**Cluster {self._cluster}** · tick {self._tick}\n\n"
            f"{self._summary}\n\nState: `{self._digest[:16] or 'none yet'}`"
        )


def _told(part: list[AddressedDirective]) -> str:
    """What a delivery tells, for the time line, such as ``place cnn, preempt gpt``."""
    words = [f"{item.directive.action} {item.job}" for item in part[:4]]
    more = f" and {len(part) - 4} more" if len(part) > 4 else ""
    return f"{', '.join(words)}{more}"[:200]
