"""A job inside its workflow: its state, and how it changes in a way that others see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

from pydantic import ValidationError
from temporalio import workflow
from temporalio.common import SearchAttributeKey, SearchAttributeUpdate

from events.types import CheckpointCommittedData, DecisionData, JobPhaseChangedData, PlacementData
from model.control import CheckpointView, DecisionView, Directive, TransitionView
from model.errors import ModelError
from model.ids import Epoch, NodeId, Step
from model.job_spec import JobSpec
from model.job_state import JobPhase, check_transition
from model.names import SearchAttribute
from model.placement import Placement
from model.requests import OperationResult
from model.runtime import AttendResult
from model.splicing import placed, widths
from workflows.job import outbox
from workflows.job.errors import OperationFailed
from workflows.job.state import KEPT_VIEWS, JobState

V = TypeVar("V")
_NEVER_S = 100 * 365 * 86_400.0


@dataclass(slots=True, eq=False)
class Part:
    """A job's part on a node, as its `attend` tells it."""

    node: NodeId
    epoch: Epoch
    result: AttendResult | None = None
    error: OperationFailed | None = None
    task: asyncio.Task[None] | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will be heard of it."""
        return self.result is not None or self.error is not None


@dataclass(slots=True, eq=False)
class Request:
    """What a person has asked for, until it is done or refused.

    Attributes:
        to, width: for a move the node, for a resize the number of devices.
        accepted: for a move or a resize: the scheduler agrees.
        result: the answer; exclusive with `refused`.
    """

    kind: str
    reason: str
    to: str = ""
    id: str = ""
    width: int = 0
    accepted: bool = False
    result: OperationResult | None = None
    refused: OperationFailed | None = None

    @property
    def over(self) -> bool:
        """Whether there is an answer."""
        return self.result is not None or self.refused is not None


@dataclass(slots=True, eq=False)
class Job:
    """One job. What is carried is in `state`; the rest is of this run of the workflow only.

    Attributes:
        page: writes the details that the UI shows.
        parts: of the current epoch.
        directives: not looked at yet, oldest first.
        requests: people's, not begun yet.
        doing: the one that is under way.
        moving: the one to move or resize that the scheduler has not answered, or that is being carried out.
        doomed: why the job can never start; empty where it may.
        unkept: why the directory of ranks that have ended could not be kept before a person cancelled the job.
        opened: this run of the workflow has its generation.
        cancel: why the job is to be cancelled; empty where it is not.
        reopen: why the record has to be opened again; empty where it has not.
        attended_at: when the parts of the epoch were last begun to be attended.
        dirty: the state has changed since the scheduler was told.
        operation: what is under way, for people.
    """

    spec: JobSpec
    state: JobState
    page: Callable[[Job], str]
    parts: dict[NodeId, Part] = field(default_factory=dict[NodeId, Part])
    directives: list[Directive] = field(default_factory=list[Directive])
    requests: list[Request] = field(default_factory=list[Request])
    doing: Request | None = None
    moving: Request | None = None
    cancel: str = ""
    reopen: str = ""
    opened: bool = False
    doomed: str = ""
    unkept: str = ""
    renew: bool = False
    attended_at: datetime | None = None
    dirty: bool = False
    telling: bool = False
    attributes: dict[str, str | int | list[str]] = field(default_factory=dict[str, "str | int | list[str]"])
    operation: str = ""
    leftover: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    @property
    def interrupted(self) -> bool:
        """Whether what is under way should give way."""
        return bool(self.cancel or self.reopen)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Where the job is."""
        return self.state.placement.nodes if self.state.placement is not None else ()

    @property
    def width(self) -> int:
        """Number of devices held."""
        return self.state.placement.width if self.state.placement is not None else 0

    @property
    def asked(self) -> int:
        """On how many devices it would run: the most that its spec allows, or what a person has asked for since."""
        return self.state.asked_width or self.spec.widest

    def is_lost(self, node: NodeId) -> bool:
        """Whether the scheduler has given the node up."""
        return node in self.state.lost

    # -- changes that others see --

    def transition(
        self,
        phase: JobPhase,
        reason: str,
        *,
        down_ms: float | None = None,
        parts_ms: dict[str, float] | None = None,
        exit_code: int | None = None,
    ) -> None:
        """Enters a phase, with its event, for everybody to see.

        Raises:
            ModelError: it may not follow the phase that the job is in.
        """
        state = self.state
        check_transition(state.phase, phase)
        before, state.phase = state.phase, phase
        self._account(before)
        state.since = workflow.now()
        self._emit_phase(before, reason, exit_code)
        placement = state.placement
        keep(
            state.transitions,
            TransitionView(
                time=workflow.now(),
                phase=phase,
                reason=reason,
                epoch=state.epoch,
                devices=placement.devices if placement else (),
                step=state.step,
                down_ms=down_ms,
                parts_ms=parts_ms,
            ),
        )
        workflow.logger.info("job %s: %s -> %s: %s", state.job, before, phase, reason)
        self.show()
        self.dirty = True

    def first_event(self, reason: str) -> None:
        """Tells where the job is, to those who know nothing of it or something else."""
        self.state.since = workflow.now()
        self._emit_phase(None, reason, None)
        keep(
            self.state.transitions,
            TransitionView(time=workflow.now(), phase=self.state.phase, reason=reason, epoch=self.state.epoch),
        )
        self.show()
        self.dirty = True

    def committed(self, view: CheckpointView, duration_ms: float) -> None:
        """A checkpoint is the job's newest."""
        state = self.state
        keep(state.checkpoints, view)
        if view.kind == "final":
            state.final = view.id
            return
        state.checkpoint, state.checkpoint_nodes = view.id, self.nodes
        state.step = max(state.step, view.step)
        if view.kind == "full":
            self.stopped_at(view.step)
        data = CheckpointCommittedData(
            checkpoint=view.id,
            kind=view.kind,
            step=view.step,
            stored_bytes=view.stored_bytes,
            total_bytes=view.total_bytes,
            duration_ms=round(duration_ms),
            stopped_ms=round(view.stopped_ms),
        )
        outbox.append(state.outbox, data, now=workflow.now(), epoch=state.epoch)

    def stopped_at(self, step: Step) -> None:
        """The ranks stand at a step, for the phase that the job is in."""
        state = self.state
        state.step = max(state.step, step)
        last = state.transitions[-1] if state.transitions else None
        if last is not None and last.phase is state.phase:
            state.transitions[-1] = replace(last, step=state.step)

    def decided(self, directive: Directive) -> None:
        """Keeps a decision of the scheduler, and tells of it where it changes something."""
        self.note(directive.action, directive.reason)
        action = "reject" if directive.action == "refuse" else directive.action
        if action in ("wait", "lost", "admit"):
            return
        self._emit_decision(action, directive, directive.reason)

    def admitted(self, directive: Directive) -> None:
        """Tells since when the job's level is promised, where that is news."""
        at = directive.admitted_at
        if at is None or at == self.state.admitted_at:
            return
        self.state.admitted_at = at
        reason = directive.reason if directive.action == "admit" else f"Its level is promised since {at:%H:%M:%S} UTC."
        self.note("admit", reason)
        self._emit_decision("admit", directive, reason)

    def _emit_decision(self, action: str, directive: Directive, reason: str) -> None:
        try:
            placed = None
            if directive.devices and action != "admit":
                placed = PlacementData(devices=directive.devices, device_of_rank=directive.device_of_rank)
            data = DecisionData.model_validate(
                {
                    "action": action,
                    "reason": reason,
                    "policy": directive.policy,
                    "state_digest": directive.state_digest,
                    "placement": placed,
                    "admitted_at": directive.admitted_at if action == "admit" else None,
                }
            )
        except (ModelError, ValidationError) as error:
            workflow.logger.error("job %s: a decision is no event: %s", self.state.job, error)
            return
        outbox.append(self.state.outbox, data, now=workflow.now(), epoch=self.state.epoch)

    def note(self, action: str, reason: str) -> None:
        """Keeps for people why something was or was not done."""
        last = self.state.decisions[-1] if self.state.decisions else None
        if last is not None and (last.action, last.reason) == (action, reason):
            return
        keep(self.state.decisions, DecisionView(workflow.now(), action, reason))
        self.show()

    def show(self) -> None:
        """What the Temporal UI shows follows the state: current details and search attributes."""
        workflow.set_current_details(self.page(self))
        self._set_attributes()

    def _set_attributes(self) -> None:
        # One that the server does not know would fail the workflow's task for ever: only those it knows are set.
        state, known = self.state, frozenset(self.state.search_attributes)
        values: dict[str, str | int | list[str]] = {
            SearchAttribute.TENANT: str(self.spec.tenant),
            SearchAttribute.TIER: self.spec.tier.value,
            SearchAttribute.PHASE: state.phase.value,
            SearchAttribute.EPOCH: int(state.epoch),
            SearchAttribute.WIDTH: self.width,
            SearchAttribute.NODES: [node.name for node in self.nodes],
        }
        changed = {
            name: value for name, value in values.items() if name in known and self.attributes.get(name) != value
        }
        if changed:
            self.attributes |= changed
            updates = [_attribute(name, value) for name, value in changed.items()]
            workflow.upsert_search_attributes(updates)  # pyright: ignore[reportUnknownMemberType]

    # -- device time --

    def delivered_ms(self) -> int:
        """Device time delivered, in milliseconds, by the workflow's clock."""
        since = self.state.running_since
        # Not the width: a job that leaves `running` may have given its devices up already.
        running = 0.0 if since is None else (workflow.now() - since).total_seconds() * 1000 * self.state.running_width
        return self.state.delivered_ms + round(running)

    def give_up_running_time(self) -> None:
        """Nobody knows when a part was lost: what counts as delivered ends with the last checkpoint of its run."""
        state = self.state
        if state.running_since is None:
            return
        taken = state.checkpoints[-1].time if state.checkpoints else state.running_since
        proved = max(timedelta(0), taken - state.running_since)
        state.delivered_ms += round(proved.total_seconds() * 1000 * state.running_width)
        state.running_since = None

    def limit_at(self) -> datetime | None:
        """When the job's device time is used up, should it run on as it does."""
        limit, since = self.spec.device_time_limit_s, self.state.running_since
        if limit is None or since is None or not self.width:
            return None
        left_s = (limit * 1000 - self.state.delivered_ms) / 1000 / self.width
        return later(since, left_s)

    def _account(self, before: JobPhase) -> None:
        state, now = self.state, workflow.now()
        if before is JobPhase.RUNNING and state.running_since is not None:
            state.delivered_ms = self.delivered_ms()
            state.running_since = None
        if state.phase is JobPhase.RUNNING:
            state.running_since, state.running_width = now, self.width
            every = self.spec.checkpoint.every_s
            if every is not None and (before is JobPhase.STARTING or state.checkpoint_due is None):
                state.checkpoint_due = later(now, every)

    def _emit_phase(self, before: JobPhase | None, reason: str, exit_code: int | None) -> None:
        state = self.state
        data = JobPhaseChangedData(
            before=before,
            after=state.phase,
            reason=reason or state.phase.value,
            step=state.step,
            placement=PlacementData.of(state.placement) if state.placement is not None else None,
            exit_code=exit_code,
            tier=self.spec.tier,
            width=self.asked,
            held=state.held,
            delivered_ms=state.delivered_ms,
        )
        outbox.append(state.outbox, data, now=workflow.now(), epoch=state.epoch)


def later(time: datetime, seconds: float) -> datetime:
    """So many seconds after a time; no more than a century, where a spec has more than a calendar."""
    return time + timedelta(seconds=min(seconds, _NEVER_S))


def keep(views: list[V], view: V) -> None:
    """Appends to what is kept for people."""
    keep_last(views, view, KEPT_VIEWS)


def keep_last(items: list[V], item: V, count: int) -> None:
    """Appends, and keeps the newest `count`."""
    items.append(item)
    del items[:-count]


def _attribute(name: str, value: str | int | list[str]) -> SearchAttributeUpdate[Any]:
    if isinstance(value, str):
        return SearchAttributeKey.for_keyword(name).value_set(value)
    if isinstance(value, int):
        return SearchAttributeKey.for_int(name).value_set(value)
    return SearchAttributeKey.for_keyword_list(name).value_set(value)


def placement_of(job: Job, directive: Directive, epoch: Epoch) -> Placement:
    """The placement that a directive names; which ranks share a device follows from what is known of the job.

    Raises:
        ModelError: it is none.
    """
    spec, found, width = job.spec, job.state.parallelism, len(directive.devices)
    device_of_rank = directive.device_of_rank
    if found is not None and spec.pack == "rank" and width in widths(spec.world_size):
        device_of_rank = placed(found, width)
    return Placement(epoch, directive.devices, device_of_rank, spec.devices_per_rank)
