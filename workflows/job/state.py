"""What a job's workflow knows, all of it: carried over every continue-as-new as its second argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar

from pydantic import ConfigDict

from model.control import (
    CheckpointView,
    DecisionView,
    TransitionView,
)
from model.ids import CheckpointId, Epoch, Generation, JobId, NodeId, Step
from model.job_state import JobPhase
from model.placement import Placement
from model.requests import JobEnd
from model.shape import Shape
from model.sharing import SharingNotice
from model.splicing import Parallelism

KEPT_VIEWS = 40
"""How many decisions, transitions and checkpoints are kept for people. Events keep all."""

KEPT_DECISIONS = 200
"""How many ids of directives are remembered, so that one that is delivered twice counts once."""

KEPT_LOST = 100
"""How many lost nodes are remembered."""


class _Carried(Shape):
    """Carried to whatever build runs next, an older one included: that leaves out what it does not know."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="ignore")


@dataclass(slots=True)
class Outbox(_Carried):
    """Events that are not published yet.

    Attributes:
        drafts: without an id, oldest first: each the JSON of an event's type, time, epoch and data.
        batch: with an id, handed to the publisher: what a broker may have seen keeps its id for ever.
        seq: the last number given in the generation.
        numbered_at: length of the history when the batch got its ids.
    """

    drafts: list[str] = field(default_factory=list[str])
    batch: list[str] = field(default_factory=list[str])
    seq: int = 0
    numbered_at: int = 0
    oldest: datetime | None = None

    @property
    def unpublished(self) -> int:
        """Number of events that no broker has acknowledged."""
        return len(self.drafts) + len(self.batch)


@dataclass(slots=True)
class MoveRequest(_Carried):
    """A person's request to move to a node, or to run on so many devices, until the scheduler has answered it."""

    id: str
    to: str
    width: int = 0


@dataclass(slots=True)
class JobState(_Carried):
    """A job between two of its workflow's decisions.

    Attributes:
        first_run: first execution run of the workflow, which is part of every event's id.
        generation: of events and notices; 0 before the record has been opened.
        notice: number of the last notice in this generation.
        placement: what the job holds; its epoch is `epoch`.
        cut: number of the last cut in the epoch.
        checkpoint: the newest committed one that is known to be sound.
        damaged: checkpoints that could not be read.
        parallelism: which ranks are replicas, and what memory they need, by the newest cut; None before the first.
        memory_bytes: of each device then; 0 where nobody knows.
        asked_width: what a person has asked for last; 0 for the widest that the spec allows.
        unfit: widths that were tried in vain since the newest placement.
        restarts: after losses, in a row without a step of progress since `restart_step`, at `restarted_at`.
        failures: of the user's program that have been retried.
        delivered_ms: device time of past epochs; `running_since` begins the current one, on `running_width` devices.
        since: when the job came to stand as it does; `delivered_ms` counts up to then.
        admitted_at: since when its level is promised, as far as it has heard.
        stopped_at: when the ranks stood still last, for the downtime of what follows.
        checkpoint_due: when the next periodic checkpoint is taken.
        lost: incarnations of nodes that the scheduler has given up, newest last.
        seen: ids of directives.
        stopped_epoch: up to it all nodes have been told to stop the job.
        unstopped: those of them that have not answered; the next start tells them again.
        told: others know that there is a job.
        cleared: the jobs that it comes `after` have ended.
        sharing: what nodes have told of incidents where ranks share a device, and is told, newest last.
        end: how the job has ended.
    """

    job: JobId
    first_run: str
    submitted_at: datetime
    cluster: str = "local"
    search_attributes: tuple[str, ...] = ()
    generation: Generation = field(default_factory=lambda: Generation(0))
    notice: int = 0
    phase: JobPhase = JobPhase.QUEUED
    held: bool = False
    epoch: Epoch = field(default_factory=lambda: Epoch(0))
    placement: Placement | None = None
    cut: int = 0
    checkpoint: CheckpointId | None = None
    checkpoint_nodes: tuple[NodeId, ...] = ()
    damaged: list[CheckpointId] = field(default_factory=list[CheckpointId])
    parallelism: Parallelism | None = None
    memory_bytes: int = 0
    asked_width: int = 0
    unfit: tuple[int, ...] = ()
    step: Step = field(default_factory=lambda: Step(0))
    restarts: int = 0
    restart_step: int = -1
    restarted_at: datetime | None = None
    failures: int = 0
    preemptions: int = 0
    moves: int = 0
    resizes: int = 0
    recoveries: int = 0
    delivered_ms: int = 0
    running_since: datetime | None = None
    running_width: int = 0
    since: datetime | None = None
    admitted_at: datetime | None = None
    stopped_at: datetime | None = None
    checkpoint_due: datetime | None = None
    lost: list[NodeId] = field(default_factory=list[NodeId])
    seen: list[str] = field(default_factory=list[str])
    stopped_epoch: Epoch = field(default_factory=lambda: Epoch(0))
    unstopped: tuple[NodeId, ...] = ()
    waiting: str = "It waits for the scheduler's first answer."
    move: MoveRequest | None = None
    decisions: list[DecisionView] = field(default_factory=list[DecisionView])
    transitions: list[TransitionView] = field(default_factory=list[TransitionView])
    checkpoints: list[CheckpointView] = field(default_factory=list[CheckpointView])
    outbox: Outbox = field(default_factory=Outbox)
    exit_code: int | None = None
    failure: str = ""
    final: CheckpointId | None = None
    sharing: list[SharingNotice] = field(default_factory=list[SharingNotice])
    end: JobEnd | None = None
    told: bool = False
    cleared: bool = False
