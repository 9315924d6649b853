"""All jobs at a glance: what visibility lists, what each workflow answers, and what the nodes have told last."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from cli.fleet.client import ANSWER_S, LIST, Fleet
from model.control import JobView
from model.job_state import JobPhase
from model.manifest import Pack
from model.names import JOB_WORKFLOW, SearchAttribute
from model.records import NodeRecord
from proxy_runtime.errors import ErgoError

if TYPE_CHECKING:
    from temporalio.client import WorkflowExecution

_AT_ONCE = 8
MEMO_NAME, MEMO_RANKS, MEMO_PACK = "name", "ranks", "pack"
"""Keys of the memo that `ergo submit` sets, so that jobs have names where no worker answers."""

# What the server calls a closed workflow, where no phase says it: somebody ended it from outside.
_CLOSED = {"TERMINATED": JobPhase.CANCELLED, "CANCELED": JobPhase.CANCELLED, "COMPLETED": JobPhase.COMPLETED}


@dataclass(frozen=True, slots=True)
class Row:
    """A job in a list; what `ergo ps --json` prints.

    Attributes:
        ranks: None where only visibility knows the job and nothing says it.
        pack: ``node``: the job starts its own ranks.
        step: None where neither its workflow nor a node has told it: of ended jobs `ergo show` tells it.
        nodes: names, without incarnations.
        waiting: why it does not run, where it should.
        source: ``workflow``, or ``visibility`` where no worker has answered in time: the state may be old.
    """

    id: str
    name: str
    tenant: str
    tier: str
    phase: str
    held: bool
    ranks: int | None
    width: int
    step: int | None
    epoch: int
    nodes: tuple[str, ...]
    submitted_at: datetime
    waiting: str
    source: Literal["workflow", "visibility"]
    pack: Pack = "rank"

    @property
    def ended(self) -> bool:
        """Whether nothing can follow."""
        return self.phase in (JobPhase.COMPLETED, JobPhase.FAILED, JobPhase.CANCELLED)

    def to_json(self, now: datetime) -> dict[str, Any]:
        """The documented fields."""
        return {**asdict(self), "age_s": round(max(0.0, (now - self.submitted_at).total_seconds()), 1)}


@dataclass(frozen=True, slots=True)
class Listing:
    """Jobs in the order of a list.

    Attributes:
        nodes_known: whether the nodes' own records could be read.
        views: of those jobs whose workflows have answered.
    """

    rows: tuple[Row, ...]
    nodes_known: bool
    views: dict[str, JobView] = field(default_factory=dict[str, JobView])

    @property
    def unanswered(self) -> int:
        """Jobs that have not ended and of which only visibility could tell."""
        return sum(row.source == "visibility" and not row.ended for row in self.rows)


async def list_jobs(fleet: Fleet, *, ended: bool = False, tenant: str | None = None, limit: int = 200) -> Listing:
    """Lists jobs, those that hold or want devices first. Takes `ANSWER_S` at most for what workers are asked."""
    client = await fleet.temporal()
    query = visibility_query(ended, tenant)
    executions = [found async for found in client.list_workflows(query, limit=limit, rpc_timeout=LIST)]
    known = newest_runs(executions)
    # Workflows are replayed to answer: those that have ended have told visibility all that a list shows.
    asked = [job for job, row in known.items() if not row.ended]
    nodes, views = await asyncio.gather(_nodes(fleet), _views(fleet, asked))
    for job, view in views.items():
        known[job] = row_of_view(view, nodes or ())
    if nodes is not None:
        known = {job: row if row.source == "workflow" else with_live_step(row, nodes) for job, row in known.items()}
    return Listing(tuple(in_order(known.values())), nodes is not None, views)


def newest_runs(executions: Iterable[WorkflowExecution]) -> dict[str, Row]:
    """A row a job, by its newest run: one that was reset, or went on as a new run, has several."""
    known: dict[str, Row] = {}
    for execution in sorted(executions, key=lambda execution: execution.start_time):
        row, before = row_of_execution(execution), known.pop(execution.id, None)
        known[row.id] = replace(row, submitted_at=before.submitted_at) if before is not None else row
    return known


def visibility_query(ended: bool, tenant: str | None) -> str:
    """The list filter. Values are quoted; ids of tenants hold no quotes."""
    parts = [f"WorkflowType = '{JOB_WORKFLOW}'"]
    if not ended:
        parts.append("ExecutionStatus = 'Running'")
    if tenant is not None:
        parts.append(f"{SearchAttribute.TENANT} = '{tenant}'")
    return " AND ".join(parts)


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Running ones first, then those that wait, then the ended; in each the newest first."""

    def key(row: Row) -> tuple[int, float]:
        return (2 if row.ended else 0 if row.width else 1, -row.submitted_at.timestamp())

    return sorted(rows, key=key)


def row_of_view(view: JobView, nodes: Sequence[NodeRecord] = ()) -> Row:
    """A job by its workflow's own answer."""
    row = Row(
        id=view.id,
        name=view.name,
        tenant=view.tenant,
        tier=view.tier,
        phase=view.phase,
        held=view.held,
        ranks=view.ranks,
        width=view.width,
        step=view.step,
        epoch=view.epoch,
        nodes=tuple(dict.fromkeys(device.node.name for device in view.placement)),
        submitted_at=view.submitted_at,
        waiting=view.waiting,
        source="workflow",
        pack=view.pack,
    )
    return with_live_step(row, nodes)


def row_of_execution(execution: WorkflowExecution) -> Row:
    """A job by what visibility knows."""
    attributes = execution.search_attributes
    first = {name: values[0] if values else None for name, values in attributes.items()}
    nodes = tuple(str(name).rpartition("@")[0] or str(name) for name in attributes.get(SearchAttribute.NODES, ()))
    memo = _memo(execution)
    status = execution.status.name if execution.status else "RUNNING"
    phase = str(first.get(SearchAttribute.PHASE) or JobPhase.QUEUED)
    if status not in ("RUNNING", "CONTINUED_AS_NEW") and not JobPhase(phase).ended:
        phase, nodes = _CLOSED.get(status, JobPhase.FAILED).value, ()
    return Row(
        id=execution.id,
        name=str(memo.get(MEMO_NAME) or execution.id),
        tenant=str(first.get(SearchAttribute.TENANT) or ""),
        tier=str(first.get(SearchAttribute.TIER) or ""),
        phase=phase,
        held=False,
        ranks=_whole(memo.get(MEMO_RANKS)),
        width=0 if JobPhase(phase).ended else _whole(first.get(SearchAttribute.WIDTH)) or 0,
        step=None,
        epoch=_whole(first.get(SearchAttribute.EPOCH)) or 0,
        nodes=nodes,
        submitted_at=execution.start_time.astimezone(UTC),
        waiting="",
        source="visibility",
        pack="node" if memo.get(MEMO_PACK) == "node" else "rank",
    )


def live_step(job: str, epoch: int, nodes: Iterable[NodeRecord]) -> int | None:
    """The lowest step that the nodes of an epoch have told with their leases; None where none has."""
    steps = [part.step for node in nodes for part in node.jobs if part.job == job and part.epoch == epoch]
    return min(steps, default=None)


def with_live_step(row: Row, nodes: Iterable[NodeRecord]) -> Row:
    """The row with the newer of both steps: a workflow hears of steps at transitions and checkpoints only."""
    live = live_step(row.id, row.epoch, nodes)
    return row if live is None or live <= (row.step or 0) else replace(row, step=int(live))


async def _nodes(fleet: Fleet) -> list[NodeRecord] | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await fleet.nodes()
    except (ErgoError, TimeoutError):
        return None  # the store is away or not ours to read: the workflows' own steps are shown


async def _views(fleet: Fleet, jobs: Sequence[str]) -> dict[str, JobView]:
    """What workflows answer in time; all of them together have one deadline."""
    limit = asyncio.Semaphore(_AT_ONCE)
    views: dict[str, JobView] = {}

    async def ask(job: str) -> None:
        async with limit:
            try:
                views[job] = await fleet.view(job, answer_s=ANSWER_S)
            except ErgoError:
                pass  # visibility's row stays, and is marked

    tasks = [asyncio.create_task(ask(job)) for job in jobs]
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=ANSWER_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return views


def _memo(execution: WorkflowExecution) -> dict[str, Any]:
    """The memo as `ergo submit` has written it; whoever starts jobs otherwise has none, or another one."""
    import json

    found: dict[str, Any] = {}
    for name, payload in execution.raw_info.memo.fields.items():
        try:
            found[name] = json.loads(payload.data)
        except ValueError:
            continue
    return found


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
