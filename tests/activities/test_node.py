"""Node activities on a real Temporal server. The runtime below them is scripted: what matters is who is told what."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.fates import TemporalFates
from activities.node import NodeActivities
from infra.converter import DATA_CONVERTER
from model.ids import DeviceId, Epoch, JobId, NodeId, Step
from model.job_spec import parse_job_spec
from model.placement import Placement
from model.runtime import AttendInput, AttendResult, Outcome, Progress, RuntimeCode, StopInput, StopResult
from proxy_runtime.errors import ErgoError

NODE = NodeId("node-1", 1)
SPEC = parse_job_spec({"apiVersion": "ergosphere/v1", "argv": ["python", "x.py"]})
DEADLINE_S = 30.0


def attend_input(job: str) -> AttendInput:
    placement = Placement(Epoch(1), (DeviceId(NODE, ("cpu-0",)),), (0,))
    return AttendInput(JobId(job), Epoch(1), NODE, SPEC, placement, "fresh")


@workflow.defn(name="Probe")
class Probe:
    """Attends a part; signals cancel the activity or continue as new."""

    def __init__(self) -> None:
        self._cancel = False
        self._renew = False

    @workflow.run
    async def run(self, request: AttendInput) -> AttendResult | None:
        handle = workflow.start_activity(
            "attend",
            request,
            result_type=AttendResult,
            task_queue=workflow.info().task_queue,
            heartbeat_timeout=timedelta(seconds=3),
            start_to_close_timeout=timedelta(minutes=10),
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
            retry_policy=RetryPolicy(initial_interval=timedelta(milliseconds=100)),
        )
        await workflow.wait_condition(lambda: self._cancel or self._renew or handle.done())
        if self._renew:
            workflow.continue_as_new(request)
        if self._cancel:
            handle.cancel()
        try:
            return await handle
        except ActivityError:
            if self._cancel:
                return None
            raise

    @workflow.signal
    def cancel(self) -> None:
        self._cancel = True

    @workflow.signal
    def renew(self) -> None:
        self._renew = True


@dataclass
class ScriptedRuntime:
    """Attends until told how it ends; remembers what it was asked. Has a queue of its own: all tests share a server."""

    queue: str = field(default_factory=lambda: f"node-{secrets.token_hex(4)}")
    error: ErgoError | None = None
    attends: int = 0
    let_go: int = 0
    stopped: list[StopInput] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)

    def attend(self, request: AttendInput, report: Callable[[Progress], None]) -> AttendResult:
        self.attends += 1
        if self.error is not None:
            raise self.error
        step = 0
        try:
            while not self.ending.wait(0.1):
                step += 1
                report(Progress(Step(step), step * 100, 0.5))
        except BaseException:
            self.let_go += 1
            raise
        outcome = Outcome.STOPPED if self.stopped else Outcome.COMPLETED
        return AttendResult(outcome, Progress(Step(step), step * 100))

    def stop(self, request: StopInput) -> StopResult:
        self.stopped.append(request)
        self.ending.set()
        return StopResult(request.epoch)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"nobody was to call {name}")


@pytest.fixture(scope="module")
async def client(temporal_server: str) -> Client:
    return await Client.connect(temporal_server, data_converter=DATA_CONVERTER)


@asynccontextmanager
async def agent(client: Client, runtime: ScriptedRuntime) -> AsyncIterator[Worker]:
    """A worker with the activities and, on the same queue, the workflow."""
    activities = NodeActivities(runtime, TemporalFates(client))
    with ThreadPoolExecutor(8) as pool:
        worker = Worker(
            client,
            task_queue=runtime.queue,
            activities=activities.all,
            workflows=[Probe],
            workflow_runner=UnsandboxedWorkflowRunner(),
            activity_executor=pool,
            max_heartbeat_throttle_interval=timedelta(milliseconds=200),
            graceful_shutdown_timeout=timedelta(seconds=1),
        )
        async with worker:
            yield worker


async def start(client: Client, runtime: ScriptedRuntime, name: str) -> WorkflowHandle[Any, Any]:
    job = f"{name}-{runtime.queue}"
    return await client.start_workflow(
        "Probe", attend_input(job), id=job, task_queue=runtime.queue, result_type=AttendResult
    )


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    limit = time.monotonic() + DEADLINE_S
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        assert time.monotonic() < limit, "it did not happen in time"
        await asyncio.sleep(0.05)


async def test_progress_travels_as_heartbeat_and_the_result_comes_back(client: Client) -> None:
    runtime = ScriptedRuntime()
    async with agent(client, runtime):
        handle = await start(client, runtime, "job-a")

        async def told() -> bool:
            pending = (await handle.describe()).raw_description.pending_activities
            beats = [p.heartbeat_details.payloads for p in pending if p.heartbeat_details.payloads]
            details = [await client.data_converter.decode(payloads, [Progress]) for payloads in beats]
            return any(found and found[0].loss == 0.5 for found in details)

        await until(told)
        runtime.ending.set()
        result = await handle.result()
    assert result.outcome is Outcome.COMPLETED
    assert result.progress.step > 0


async def test_cancelled_by_the_workflow_it_lets_go_and_ends_nothing(client: Client) -> None:
    runtime = ScriptedRuntime()
    async with agent(client, runtime):
        handle = await start(client, runtime, "job-b")
        await until(lambda: runtime.attends == 1)
        await handle.signal("cancel")
        assert await handle.result() is None
        await until(lambda: runtime.let_go == 1)
    assert not runtime.stopped


async def test_a_terminated_job_is_ended(client: Client) -> None:
    runtime = ScriptedRuntime()
    async with agent(client, runtime):
        handle = await start(client, runtime, "job-c")
        await until(lambda: runtime.attends == 1)
        await handle.terminate("in the UI")
        await until(lambda: bool(runtime.stopped))
    assert (runtime.stopped[0].job, runtime.stopped[0].epoch) == (handle.id, 1)
    assert "terminated" in runtime.stopped[0].reason


async def test_a_job_that_goes_on_as_a_new_run_is_left_alone(client: Client) -> None:
    runtime = ScriptedRuntime()
    async with agent(client, runtime):
        handle = await start(client, runtime, "job-d")
        await until(lambda: runtime.attends == 1)
        await handle.signal("renew")
        await until(lambda: runtime.attends == 2 and runtime.let_go == 1)
        assert not runtime.stopped
        runtime.ending.set()
        assert (await client.get_workflow_handle(handle.id, result_type=AttendResult).result()).outcome == "completed"


async def test_an_agent_that_is_shut_down_lets_go_and_the_next_one_attends_again(client: Client) -> None:
    runtime = ScriptedRuntime()
    async with agent(client, runtime):
        handle = await start(client, runtime, "job-e")
        await until(lambda: runtime.attends == 1)
    assert runtime.let_go == 1 and not runtime.stopped
    async with agent(client, runtime):
        await until(lambda: runtime.attends == 2)
        runtime.ending.set()
        assert (await handle.result()).outcome is Outcome.COMPLETED


@pytest.mark.parametrize("code", list(RuntimeCode))
async def test_an_error_that_trying_again_does_not_help_is_told_at_once(client: Client, code: RuntimeCode) -> None:
    runtime = ScriptedRuntime(error=ErgoError("It does not go.", code=code, remedy="Do something."))
    async with agent(client, runtime):
        handle = await start(client, runtime, f"job-{code.replace('.', '-')}")
        with pytest.raises(WorkflowFailureError) as caught:
            await handle.result()
    cause = caught.value.cause.__cause__
    assert isinstance(cause, ApplicationError)
    assert (cause.type, cause.message) == (code, "It does not go. Do something.")
    assert runtime.attends == 1


async def test_any_other_error_is_tried_again(client: Client) -> None:
    runtime = ScriptedRuntime(error=ErgoError("The store is away.", code="store.unreachable"))
    async with agent(client, runtime):
        handle = await start(client, runtime, "job-f")
        await until(lambda: runtime.attends >= 2)
        runtime.error = None
        runtime.ending.set()
        assert (await handle.result()).outcome is Outcome.COMPLETED
