"""What every fleet command reaches: the workflow engine, the fleet's store, its nodes; and its errors as sentences."""

from __future__ import annotations

import asyncio
import difflib
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

from cli.fleet import trace
from model.names import JOB_TASK_QUEUE, JOB_WORKFLOW, Query, Update, cluster_workflow_id
from proxy_runtime.errors import ErgoError

if TYPE_CHECKING:
    from temporalio.client import Client, WorkflowExecutionDescription, WorkflowHandle

    from infra.settings import Settings
    from model.cluster import ClusterView
    from model.control import DecisionView, JobView
    from model.job_spec import JobSpec
    from model.records import NodeRecord
    from model.requests import OperationResult
    from proxy_runtime.storage.fleet import FleetStore

T = TypeVar("T")

ANSWER_S = 3.0
"""How long the queries of a list are waited for, all together: a worker answers in milliseconds, or it is away."""
VIEW_S = 10.0
"""How long the query about one job is waited for: a worker that was just started replays the job first."""
ACCEPT_S = 20.0
"""How long an update may take to be accepted: a worker that was just restarted replays its jobs first."""
LIST = timedelta(seconds=10)
"""How long a page of a list is waited for."""
_SUGGESTIONS = 200
_NODES = "records/nodes"


class FleetError(ErgoError):
    """Something about the fleet or a job of it, told to a person."""


class NoAnswer(FleetError):
    """No worker answers for a job, or the workflow engine does not: what waits goes on waiting."""

    code = "fleet.no-answer"


class JobEnded(FleetError):
    """The request came too late."""

    code = "fleet.job-ended"


class Fleet:
    """A fleet as commands see it. Each part is opened when it is first asked for."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._client: Client | None = None

    @classmethod
    def load(cls) -> Fleet:
        """The fleet that the environment and `fleet.json` name."""
        from infra.settings import Settings

        return cls(Settings.load())

    async def temporal(self) -> Client:
        """The workflow engine's client."""
        if self._client is None:
            # What its core logs (attempts, retries) is told by our own sentences; without a handler Python would
            # write it to stderr.
            logger = logging.getLogger("temporalio")
            logger.propagate, logger.handlers = False, [logging.NullHandler()]
            self._client = await self.settings.connect_temporal()
        return self._client

    @cached_property
    def store(self) -> FleetStore:
        """The fleet's store; its methods block."""
        return self.settings.fleet_store()

    async def nodes(self) -> list[NodeRecord]:
        """The nodes that have neither left nor been given up."""
        records = await asyncio.to_thread(lambda: self.store.nodes())
        return sorted((record for record in records if not record.lost and not record.left), key=lambda r: r.node.name)

    async def all_nodes(self) -> list[tuple[NodeRecord, datetime | None]]:
        """All nodes that have a record, by name, each with the time of its last renewal where the store tells it."""

        def read() -> list[tuple[NodeRecord, datetime | None]]:
            renewed: dict[str, float] = {}
            for found in self.store.bucket.find(_NODES):
                name = found.key.removeprefix(f"{_NODES}/").partition("/")[0]
                renewed[name] = max(found.modified_s, renewed.get(name, 0.0))
            times = {name: datetime.fromtimestamp(at, UTC) for name, at in renewed.items()}
            records = sorted(self.store.nodes(), key=lambda record: record.node.name)
            return [(record, times.get(record.node.name)) for record in records]

        return await asyncio.to_thread(read)

    async def scheduler(self) -> ClusterView | None:
        """What the cluster's scheduler says of itself; None where it does not answer."""
        from temporalio.client import WorkflowQueryFailedError
        from temporalio.service import RPCError

        from model.cluster import ClusterView

        handle = (await self.temporal()).get_workflow_handle(cluster_workflow_id(self.settings.cluster))
        try:
            async with asyncio.timeout(ANSWER_S):
                limit = timedelta(seconds=ANSWER_S)
                return await handle.query(Query.SHOW.value, result_type=ClusterView, rpc_timeout=limit)
        except (TimeoutError, RPCError, WorkflowQueryFailedError):
            return None

    def ui(self, job: str | None = None) -> str:
        """Where a browser shows the job's workflow; empty where nobody has said where the UI is."""
        file = self.settings.fleet_file()
        return "" if file is None else file.workflow_url(job)

    async def served(self, task_queue: str = JOB_TASK_QUEUE) -> bool:
        """Whether a worker polls a queue, or has in the last minutes; True where the server does not tell."""
        from temporalio.api.enums.v1 import TaskQueueType
        from temporalio.api.taskqueue.v1 import TaskQueue
        from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
        from temporalio.service import RPCError

        client = await self.temporal()
        request = DescribeTaskQueueRequest(
            namespace=client.namespace,
            task_queue=TaskQueue(name=task_queue),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
        )
        try:
            answer = await client.workflow_service.describe_task_queue(request, timeout=timedelta(seconds=ANSWER_S))
        except RPCError:
            return True
        return bool(answer.pollers)

    async def handle(self, job: str) -> WorkflowHandle[Any, Any]:
        """The job's workflow; nothing is asked of the server yet."""
        return (await self.temporal()).get_workflow_handle(job)

    async def describe(self, job: str) -> WorkflowExecutionDescription:
        """What the server itself knows of a job.

        Raises:
            FleetError: ``fleet.unknown-job``.
        """
        from temporalio.service import RPCError, RPCStatusCode

        try:
            found = await (await self.handle(job)).describe(rpc_timeout=LIST)
        except RPCError as error:
            if error.status in (RPCStatusCode.NOT_FOUND, RPCStatusCode.INVALID_ARGUMENT):
                await self._fail(job, error)
            raise rpc_error(error) from None
        if found.workflow_type != JOB_WORKFLOW:
            await self._unknown(job)
        return found

    async def view(self, job: str, *, answer_s: float = VIEW_S) -> JobView:
        """What the job's workflow says of itself.

        Raises:
            NoAnswer: no worker has answered within `answer_s` seconds.
            FleetError: ``fleet.unknown-job``.
        """
        from model.control import JobView

        return await self._query(job, Query.SHOW, JobView, answer_s)

    async def explain(self, job: str) -> list[DecisionView]:
        """The decisions about a job with their reasons, newest last; errors as for `view`."""
        from model.control import DecisionView

        return await self._query(job, Query.EXPLAIN, list[DecisionView], VIEW_S)

    async def ask(self, job: str, update: Update, request: object, *, accept_s: float = ACCEPT_S) -> OperationResult:
        """Asks something of a job and returns its answer: how long that takes is said in the request.

        Args:
            job: its id.
            update: what is asked.
            request: the update's one argument.
            accept_s: seconds after which nobody is believed to be there.

        Raises:
            FleetError: ``fleet.refused`` with the job's own sentence, ``fleet.unknown-job``.
            JobEnded: it has ended.
            NoAnswer: no worker has taken the request; it may still do so later.
        """
        from temporalio.client import (
            WorkflowUpdateFailedError,
            WorkflowUpdateRPCTimeoutOrCancelledError,
            WorkflowUpdateStage,
        )
        from temporalio.service import RPCError

        from model.requests import OperationResult

        handle = await self.handle(job)
        accepted = WorkflowUpdateStage.ACCEPTED
        self.note(job, "asks", update=update.value, request=request)
        try:
            # No wait_for, here and elsewhere: a call that it gives up fails unseen, and asyncio complains on stderr.
            async with asyncio.timeout(accept_s):
                asked = await handle.start_update(
                    update.value, request, wait_for_stage=accepted, result_type=OperationResult
                )
            answer = await asked.result()
        except WorkflowUpdateFailedError as error:
            refused = _refusal(error)
            self.note(job, "is refused", level="warning", update=update.value, error=refused.message)
            raise refused from None
        except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError):
            raise _no_answer(job, "It may still do what was asked once a worker is back.") from None
        except RPCError as error:
            await self._fail(job, error)
        self.note(job, "is answered", update=update.value, phase=answer.phase, answer=answer.message)
        return answer

    def note(self, job: str, event: str, *, level: str = "info", **more: object) -> None:
        """Writes a line about a job into the log of commands."""
        trace.note(self.settings.fleet_dir, job, event, level=level, **more)

    async def spec(self, job: str) -> JobSpec:
        """What the job was submitted as: the first argument of its workflow, in every run of it."""
        from model.job_spec import JobSpec

        client = await self.temporal()
        async for event in (await self.handle(job)).fetch_history_events(page_size=1):
            payloads = event.workflow_execution_started_event_attributes.input.payloads
            return (await client.data_converter.decode(payloads[:1], [JobSpec]))[0]
        raise FleetError(f"Job {job} has no history.", code="fleet.history")

    async def job_ids(self, *, running: bool = False, limit: int = _SUGGESTIONS) -> list[str]:
        """Ids of jobs, newest first."""
        query = f"WorkflowType = '{JOB_WORKFLOW}'" + (" AND ExecutionStatus = 'Running'" if running else "")
        client = await self.temporal()
        runs = client.list_workflows(query, limit=limit, page_size=min(limit, 200), rpc_timeout=LIST)
        return list(dict.fromkeys([found.id async for found in runs]))  # a job that was reset has several runs

    async def _query(self, job: str, query: Query, shape: Any, answer_s: float) -> Any:
        from temporalio.client import WorkflowQueryFailedError, WorkflowQueryRejectedError
        from temporalio.service import RPCError, RPCStatusCode

        late = (RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED)
        limit = timedelta(seconds=answer_s)
        handle = await self.handle(job)
        try:
            # The limit of the call alone is not enough: the client tries again what the server calls unavailable.
            async with asyncio.timeout(answer_s + 0.5):
                return await handle.query(query.value, result_type=shape, rpc_timeout=limit)
        except TimeoutError:
            await self.describe(job)  # says so where it is the server that does not answer
            raise _no_answer(job) from None
        except RPCError as error:
            if error.status in late:
                await self.describe(job)
            await self._fail(job, error)
        except (WorkflowQueryFailedError, WorkflowQueryRejectedError) as error:
            # Nothing else is started under a job's id; but other workflows have ids too.
            if (await self.describe(job)).workflow_type == JOB_WORKFLOW:
                raise _cannot_be_shown(job, str(error)) from None
            raise

    async def _fail(self, job: str, error: Any) -> NoReturn:
        """Turns an error of the server into a sentence."""
        from temporalio.service import RPCStatusCode

        text = str(error.message if hasattr(error, "message") else error)
        match error.status:
            case RPCStatusCode.NOT_FOUND if "already completed" in text:
                raise JobEnded(
                    f"Job {job} has ended already.", remedy=f"`ergo show {job}` tells how; `ergo ps -a` lists it."
                ) from None
            case RPCStatusCode.NOT_FOUND:
                await self._unknown(job)
            case RPCStatusCode.INVALID_ARGUMENT if "id" in text.lower():
                await self._unknown(job)
            # A worker that has been away for longer is known to the server, which then does not wait for it.
            case RPCStatusCode.DEADLINE_EXCEEDED | RPCStatusCode.CANCELLED | RPCStatusCode.FAILED_PRECONDITION:
                raise _no_answer(job) from None
            case _:
                raise rpc_error(error) from None

    async def _unknown(self, job: str) -> NoReturn:
        from temporalio.service import RPCError

        try:
            known = await self.job_ids()
        except RPCError:
            known = []  # the sentence stands without a guess
        guesses = difflib.get_close_matches(job, known, 1, cutoff=0.5) or [name for name in known if job in name][:1]
        remedy = f"Did you mean {guesses[0]}?" if guesses else "`ergo ps -a` lists all jobs."
        raise FleetError(f"There is no job {job}.", code="fleet.unknown-job", remedy=remedy) from None


def _cannot_be_shown(job: str, why: str) -> FleetError:
    """A worker has the job, and its workflow does not answer."""
    if "TMPRL1100" in why or "nondeterminis" in why.lower():
        return FleetError(
            f"Job {job} cannot be shown: its worker does not come to what the job's history says ({why.rstrip('.')}).",
            code="fleet.replay",
            remedy="That is a fault in the workflow, or the worker is of another version than the one that wrote the "
            "history. Its ranks run on meanwhile; docs/fleet.md (A history that cannot be replayed) says what helps.",
        )
    return FleetError(
        f"Job {job} cannot be shown: {why.rstrip('.')}.", code="fleet.query", remedy="See the log of the job workers."
    )


def call(main: Callable[[Fleet], Awaitable[T]]) -> T:
    """Runs the asynchronous part of a command. Ctrl-C ends it in order, with exit code 130."""
    from temporalio.service import RPCError

    async def run() -> T:
        try:
            return await main(Fleet.load())
        except Exception:
            # temporalio takes the cancellation of a call for a server that does not answer.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from None
            raise

    with interruptible():
        try:
            return asyncio.run(run())
        except RPCError as error:
            raise rpc_error(error) from None


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block as an exception, so that it can clean up; then the command, with their code."""

    def interrupt(number: int, _: object) -> None:
        nonlocal received
        received = number
        signal.default_int_handler(number, None)

    received: int = signal.SIGINT
    # asyncio cancels what runs on SIGINT only where Python's own handler is there.
    before = [(signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))]
    before.append((signal.SIGTERM, signal.signal(signal.SIGTERM, interrupt)))
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(128 + received) from None
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def rpc_error(error: Any) -> FleetError:
    """What the server has said, as an error of ours."""
    from temporalio.service import RPCStatusCode

    if error.status in (RPCStatusCode.UNAVAILABLE, RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED):
        return NoAnswer(
            "Temporal does not answer.",
            code="fleet.temporal-away",
            remedy="`ergo up` starts it for a local fleet; running jobs are not affected.",
        )
    text = str(error.message).splitlines()[0][:300]
    if "search attribute" in text.lower():
        return FleetError(
            f"The namespace of Temporal does not have our search attributes ({text}).",
            code="fleet.search-attributes",
            remedy="`ergo up` registers them for a local fleet; docs/cli.md says how for another.",
        )
    return FleetError(
        f"Temporal does not do what it was asked: {text} ({error.status.name.lower()}).",
        code="fleet.temporal",
        remedy="See `ergo fleet`, and the log of the server.",
    )


def _no_answer(job: str, more: str = "") -> NoAnswer:
    return NoAnswer(
        f"No worker answers for job {job}.",
        remedy=" ".join(filter(None, (more, "`ergo up` starts what is missing; the job itself is not affected."))),
    )


def _refusal(error: Any) -> ErgoError:
    from temporalio.exceptions import ApplicationError

    cause = error.cause
    if not isinstance(cause, ApplicationError):
        return FleetError(f"{cause or error}", code="fleet.refused")
    text = str(cause.message)
    return FleetError(text if text.endswith((".", "!", "?", "`")) else f"{text}.", code=cause.type or "fleet.refused")
