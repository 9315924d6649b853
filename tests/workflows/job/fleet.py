"""A fleet for tests: real Temporal workers of a job, of its nodes and of a scheduler that does what the test says."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio import activity
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import Client, WorkflowHandle, WorkflowUpdateFailedError
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities.fates import TemporalFates
from activities.job import JobActivities
from activities.node import NodeActivities
from events.envelope import to_json
from events.types import Event, JobPhaseChanged
from infra.job_worker import job_worker
from model.control import Directive, JobNotice, JobView, NotifyInput
from model.ids import CheckpointId, DeviceId, Generation, NodeId
from model.job_state import JobPhase, check_transition
from model.names import CLUSTER_TASK_QUEUE, JOB_TASK_QUEUE, JOB_WORKFLOW, Activity, Query, Signal, node_task_queue
from model.runtime import Outcome
from proxy_runtime.errors import ErgoError
from tests.workflows.job.fakes import FakeNode, NoFates, Records, Troubles

DEADLINE_S = 30.0
DIGEST = "0" * 64


async def until(condition: Callable[[], Any] | Callable[[], Awaitable[Any]], what: str, deadline_s: float = DEADLINE_S):
    """Polls until the condition holds, and returns what it gave."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0.03)


async def refused(asked: Awaitable[Any]) -> str:
    """The sentence with which a job refuses what it is asked."""
    with pytest.raises(WorkflowUpdateFailedError) as failure:
        await asked
    return str(failure.value.cause)


async def ends(job: Handle) -> list[Event]:
    """Nothing goes wrong any more, and the job runs to its end; its events."""
    job.fleet.troubles.none()
    await job.end(Outcome.COMPLETED)
    await job.workflow.result()
    return job.check()


async def reset(client: Client, job: Handle, *, last: bool = False, task: int | None = None) -> None:
    """As the UI does: back to a finished workflow task, the one in the middle by default; skips one too many."""
    description = await job.workflow.describe()
    history = await job.workflow.fetch_history()
    finished = [
        event.event_id for event in history.events if event.HasField("workflow_task_completed_event_attributes")
    ]
    if task is not None and task >= len(finished):
        pytest.skip(f"only {len(finished)} tasks")
    await client.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=job.id, run_id=description.run_id),
            reason="test",
            workflow_task_finish_event_id=finished[(-1 if last else len(finished) // 2) if task is None else task],
            request_id=str(len(history.events)),
        )
    )


class Sink:
    """Kafka, as far as a job sees it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.down = False

    def publish(self, events: Sequence[Event]) -> int:
        if self.down:
            raise ErgoError("Kafka does not answer.", code="events.unreachable")
        self.events += events
        return len(events)

    def of(self, job: str) -> list[Event]:
        """Each event once, in the order of the first time."""
        seen: dict[str, Event] = {}
        for event in self.events:
            if event.subject == job:
                known = seen.setdefault(str(event.id), event)
                assert to_json(known) == to_json(event), f"two events with the id {event.id}"
        return list(seen.values())


class Fleet:
    """Nodes, records, Kafka and a scheduler without a mind of its own."""

    def __init__(self, client: Client, store: Path, nodes: int = 3) -> None:
        self.client = client
        self.troubles = Troubles()
        self.records = Records(store, self.troubles)
        self.sink = Sink()
        self.fates = NoFates()
        self.notices: list[JobNotice] = []
        self.attributes: tuple[str, ...] = ()
        self._checkpoints: dict[CheckpointId, dict[int, int]] = {}
        self.nodes = [
            FakeNode(NodeId(f"node-{n}", 1), self.records, self.troubles, self._checkpoints) for n in range(nodes)
        ]
        self._stack = contextlib.AsyncExitStack()
        self._workers: dict[str, Worker] = {}
        self._jobs: list[str] = []

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[Fleet]:
        """All workers run."""
        executor = ThreadPoolExecutor(64)
        try:
            await self.start_job_worker()
            for node in self.nodes:
                await self._run(str(node.id), self._node_worker(node, executor))
            await self._run("cluster", Worker(self.client, task_queue=CLUSTER_TASK_QUEUE, activities=[self.notify]))
            yield self
        finally:
            for job in self._jobs:  # a later test's workers would go on with what this one leaves
                with contextlib.suppress(RPCError):
                    await self.client.get_workflow_handle(job).terminate("the test is over")
            for node in self.nodes:  # attends that hang would hold the workers
                for part in node.parts.values():
                    part.outcome = part.outcome or Outcome.STOPPED
            for hold in self.troubles.holds.values():
                hold.set()
            for name in list(self._workers):
                await self.stop_worker(name)
            executor.shutdown(wait=False)

    async def start_job_worker(self) -> None:
        activities = JobActivities(
            self.records,
            self.sink,
            cluster="test",
            fates=TemporalFates(self.client),
            search_attributes=lambda: self.attributes,
        )
        await self._run("job", job_worker(self.client, activities, ThreadPoolExecutor(32)))

    async def _run(self, name: str, worker: Worker) -> None:
        await worker.__aenter__()
        self._workers[name] = worker

    async def stop_worker(self, name: str) -> None:
        """Ends one in order."""
        await self._workers.pop(name).__aexit__(None, None, None)

    def _node_worker(self, node: FakeNode, executor: ThreadPoolExecutor) -> Worker:
        return Worker(
            self.client,
            task_queue=node_task_queue(node.id),
            activities=NodeActivities(node, self.fates).all,
            activity_executor=executor,
            max_concurrent_activities=16,
            max_heartbeat_throttle_interval=timedelta(seconds=1),
            default_heartbeat_throttle_interval=timedelta(seconds=1),
        )

    @activity.defn(name=Activity.NOTIFY)
    async def notify(self, request: NotifyInput) -> None:
        assert request.cluster == "test"
        self.notices.append(request.notice)

    # -- what a test says --

    async def submit(self, ranks: int = 1, job: str | None = None, **fields: Any) -> Handle:
        """Starts a job."""
        spec = {"apiVersion": "ergosphere/v1", "argv": ["train"], "ranks": ranks, **fields}
        handle = await self.client.start_workflow(
            JOB_WORKFLOW, spec, id=job or f"job-{uuid.uuid4().hex[:8]}", task_queue=JOB_TASK_QUEUE
        )
        self._jobs.append(handle.id)
        return Handle(self, handle)


class Handle:
    """A job as a test sees it."""

    def __init__(self, fleet: Fleet, workflow: WorkflowHandle[Any, Any]) -> None:
        self.fleet = fleet
        self.workflow = workflow
        self.id = workflow.id

    async def show(self) -> JobView:
        return await self.workflow.query(Query.SHOW, result_type=JobView)

    async def phase(self, phase: JobPhase) -> JobView:
        """Waits for a phase."""

        async def there() -> JobView | None:
            view = await self.show()
            return view if view.phase is phase else None

        try:
            return await until(there, f"{self.id} {phase}")
        except AssertionError:
            raise AssertionError(f"not {phase}: {await self.show()}") from None

    async def notice(self, condition: Callable[[JobNotice], bool]) -> JobNotice:
        """Waits until the last notice is such a one."""

        def found() -> JobNotice | None:
            mine = [notice for notice in self.fleet.notices if notice.job == self.id]
            return mine[-1] if mine and condition(mine[-1]) else None

        try:
            return await until(found, f"notice of {self.id}")
        except AssertionError:
            raise AssertionError(f"no such notice of {self.id}; the last: {self.fleet.notices[-1:]}") from None

    async def quiet(self) -> None:
        """Waits until its workflow's last task has ordered nothing, and no task is under way."""

        async def length() -> int:
            return len((await self.workflow.fetch_history()).events)

        while True:
            before = await length()
            await asyncio.sleep(0.3)
            if await length() == before:
                break
        last = (await self.workflow.fetch_history()).events[-1]
        assert last.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED, "it ordered something"

    async def direct(
        self,
        action: str,
        *devices: DeviceId,
        request: str = "",
        nodes: Sequence[NodeId] = (),
        ranks: int = 0,
        notice: int = 0,
    ) -> None:
        """What the scheduler says; with `ranks`, more of them than devices; `notice`: on which it was decided, of the
        newest generation.
        """
        ranks = ranks or len(devices)
        directive = Directive(
            decision=uuid.uuid4().hex,
            action=action,  # type: ignore[arg-type]
            reason=f"The test wants it to {action}.",
            policy="test/1",
            state_digest=DIGEST,
            devices=devices,
            device_of_rank=tuple(rank * len(devices) // ranks for rank in range(ranks)),
            nodes=tuple(nodes),
            request=request,
            generation=self.fleet.notices[-1].generation if notice else Generation(0),
            notice=notice,
        )
        await self.workflow.signal(Signal.PLACEMENT, directive)

    async def run_on(self, *devices: DeviceId) -> JobView:
        """Places it and waits until it runs."""
        await self.notice(lambda notice: notice.wants == "devices")
        await self.direct("place", *devices)
        return await self.phase(JobPhase.RUNNING)

    async def steps(self, node: FakeNode, more: int = 3) -> None:
        """Waits until its ranks on a node have done some more steps."""
        await until(lambda: node.running(self.id), f"{self.id} runs on {node.id}")
        part = node.part(self.id)
        want = part.step + more
        await until(lambda: part.step >= want, f"steps of {self.id} on {node.id}")

    async def end(self, outcome: Outcome, code: int = 0) -> None:
        """Its ranks end, wherever they run."""
        view = await self.show()
        for node in self.fleet.nodes:
            if node.id in {device.node for device in view.placement}:
                await until(lambda node=node: (self.id, view.epoch) in node.parts, f"{self.id} on {node.id}")
        for node in self.fleet.nodes:
            for (job, _), part in node.parts.items():
                if job == self.id and part.outcome is None:
                    part.end(outcome, code)

    def check(self) -> list[Event]:
        """What must hold of every job at the end: its events are whole and legal, no epoch has run twice."""
        events = self.fleet.sink.of(self.id)
        numbers: dict[int, list[int]] = {}
        for event in events:
            numbers.setdefault(int(event.id.generation), []).append(int(event.id.seq))
        for generation, sequence in numbers.items():
            assert sequence == list(range(1, len(sequence) + 1)), f"generation {generation}: {sequence}"
        phases = [event for event in events if isinstance(event, JobPhaseChanged)]
        for before, after in itertools.pairwise(phases):
            if before.id.generation == after.id.generation and after.data.before is not None:
                assert after.data.before == before.data.after
            if after.data.before is not None:
                check_transition(after.data.before, after.data.after)
        for node in self.fleet.nodes:
            for key, count in node.started.items():
                assert count == 1, f"{key} was started {count} times on {node.id}"
        assert len(self.fleet.records.advanced) == len(set(self.fleet.records.advanced))
        return events
