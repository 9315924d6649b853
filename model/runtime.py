"""The runtime interface v1: what a node does for a job, as six calls with one input and one result each.

Activities hand these to the node's runtime. Every call names the job and its epoch and is idempotent by them:
repeating one that has been done returns the same result, and one that is under way is joined. A call with an
epoch below the highest that the node has seen of the job is refused with `RuntimeCode.FENCED`; one with a
higher epoch first ends what older epochs have on the node.

A move of a job, in order: `barrier` stop and finish, `checkpoint` write and commit, `transfer` and `restore` on
the target (which leaves the ranks paused), the job's `HEAD`, `attend` there, `stop` at the source. A call that fails
before the `HEAD` has moved is followed by `barrier` resume, and the job runs on where it is. A node may be source and
target of the same move: it restores `beside`, and is told to stop `only` the epoch that shall not be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, Protocol

from model.errors import ModelError
from model.ids import CheckpointId, Epoch, JobId, NodeId, Step, TenantId
from model.job_spec import JobSpec
from model.manifest import PartRef, RankParts, RankState
from model.placement import Placement, check_placement
from model.shape import Shape
from model.sharing import SharingIncidents


class RuntimeCode(StrEnum):
    """Codes of the errors that a caller tells apart; any other error may be tried again."""

    FENCED = "runtime.fenced"
    """A higher epoch is known: whoever asked is out of date. Never tried again."""
    UNKNOWN = "runtime.unknown"
    """The node has nothing of this job and epoch."""
    STARTING = "runtime.starting"
    """The node's part is being started or restored, and does not run yet: ask again in a moment."""
    DEADLINE = "runtime.deadline"
    """Time ran out; the job runs on as before the call."""
    DAMAGED = "runtime.damaged"
    """The checkpoint cannot be read as it was written. An earlier one may do."""
    UNSUITABLE = "runtime.unsuitable"
    """This node cannot run or restore the job: its classes, build or memory do not fit. Another one may."""


FINAL_CODES: Final = tuple(code.value for code in RuntimeCode)
"""Trying again on the same node would end the same: the workflow decides what is to be done instead."""


@dataclass(frozen=True, slots=True)
class AttendInput(Shape):
    """Run this node's part of a job until it ends, and tell how it goes.

    Attributes:
        start: ``fresh`` starts the command; ``restored`` lets go on what `restore` has left paused. Either one
            re-attaches where the part runs already.
        node: the node that is asked.
    """

    job: JobId
    epoch: Epoch
    node: NodeId
    spec: JobSpec
    placement: Placement
    start: Literal["fresh", "restored"]

    def __post_init__(self) -> None:
        _check_assignment(self.spec, self.placement, self.node, self.epoch)


@dataclass(frozen=True, slots=True)
class Progress(Shape):
    """How a job is doing on one node; it travels as heartbeat.

    Attributes:
        step: the lowest step of the node's ranks.
        loss: the last one that the job has reported, if it reports any.
        device_ms: device time delivered in this epoch, in milliseconds, over all devices of the node.
        sharing: incidents of this epoch on this node; None where there are none, or no ranks share a device.
    """

    step: Step
    device_ms: int
    loss: float | None = None
    sharing: SharingIncidents | None = None


class Outcome(StrEnum):
    """How a job's part on a node ended."""

    COMPLETED = "completed"
    """Every rank exited with 0."""
    FAILED = "failed"
    """A rank exited with another code: the user's failure."""
    LOST = "lost"
    """A process was killed or a device proxy died: ours to recover."""
    STOPPED = "stopped"
    """By `stop`, or by a higher epoch."""


@dataclass(frozen=True, slots=True)
class RankExit(Shape):
    """The end of one rank.

    Attributes:
        exit_code: its exit code; None where a signal ended it.
        signal: the number of that signal.
        last_words: the end of its log, such as a traceback.
    """

    rank: int
    exit_code: int | None = None
    signal: int | None = None
    last_words: str = ""

    def __post_init__(self) -> None:
        if (self.exit_code is None) == (self.signal is None):
            raise ModelError(
                f"Rank {self.rank} must have ended by an exit code or by a signal.",
                code="model.rank-exit",
                remedy="Give one of the two.",
            )


@dataclass(frozen=True, slots=True)
class AttendResult(Shape):
    """How a job's part on a node ended; `exits` names at least the ranks that ended by themselves."""

    outcome: Outcome
    progress: Progress
    exits: tuple[RankExit, ...] = ()

    def __post_init__(self) -> None:
        failed = any(end.exit_code not in (None, 0) for end in self.exits)
        if self.outcome is Outcome.FAILED and not failed:
            raise ModelError(
                "A failed job has a rank whose exit code is not 0.", code="model.outcome", remedy="Name it in `exits`."
            )
        if self.outcome is Outcome.COMPLETED and any(end.exit_code != 0 for end in self.exits):
            raise ModelError(
                "Every rank of a completed job has exit code 0.", code="model.outcome", remedy="Use another outcome."
            )


@dataclass(frozen=True, slots=True)
class CollectiveTarget(Shape):
    """Up to which collective of a communicator a cut lets go on: the fewest that any member has contributed to."""

    communicator: str
    collectives: int


@dataclass(frozen=True, slots=True)
class BarrierInput(Shape):
    """Bring this node's part of a job to a cut, in two phases, or let it go on.

    Attributes:
        cut: number of the cut within the epoch, from 1; makes the call idempotent.
        phase: ``stop`` holds every queue at a message boundary and counts; ``finish`` completes the collectives up to
            `targets`; ``resume`` calls the cut off, at any time, or ends it.
        at_step: the step at whose end the ranks should stand; None for where they are, or for the step that the
            foremost rank of this node is in, where `prefer_step_s` is given.
        prefer_step_s: how many seconds the end of the step is waited for, after which the ranks are stopped where they
            are; 0 for `deadline_s` with `at_step`, and for not at all without it.
        targets: for ``finish``, over all nodes of the job.
        deadline_s: seconds; after it the call fails and the job runs on.
    """

    job: JobId
    epoch: Epoch
    cut: int
    phase: Literal["stop", "finish", "resume"]
    deadline_s: float
    at_step: Step | None = None
    targets: tuple[CollectiveTarget, ...] = ()
    prefer_step_s: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("deadline_s", self.deadline_s)
        if self.targets and self.phase != "finish":
            raise ModelError(
                f"Targets were given for the phase {self.phase}.", code="model.barrier", remedy="Give them for finish."
            )


@dataclass(frozen=True, slots=True)
class BarrierResult(Shape):
    """Where the ranks of this node stand.

    Attributes:
        reached: whether all stand at `at_step`; False where the deadline for the step passed and they stand elsewhere.
        ranks: each with its step and, per communicator, collectives contributed to and complete.
    """

    reached: bool
    ranks: tuple[RankState, ...]
    timings_ms: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class NodeParts(Shape):
    """What one node has written of a checkpoint; `volume` is the job directory as this node has it.

    A commit joins the volumes of all nodes: what a node has changed since the epoch began goes into the whole.
    """

    node: NodeId
    ranks: tuple[RankParts, ...]
    states: tuple[RankState, ...]
    volume: PartRef | None = None


@dataclass(frozen=True, slots=True)
class CheckpointInput(Shape):
    """Write this node's part of a checkpoint at a finished cut, or commit one that all nodes have written.

    Attributes:
        kind: ``live`` runs on while the rest is written; ``suspend`` keeps processes frozen and device state in host
            memory, for a fast resume on the same node; ``full`` writes everything, so that the job can move anywhere,
            and leaves it stopped; ``leaving`` does the same with the processes and devices of `ranks` only, and the
            others stand in their memory; ``final`` writes the volume of a job whose ranks have ended (no cut: 0).
        commit: None to write; the parts of all nodes to write the manifest and move the job's ``HEAD`` to it. The
            commit is conditional on the epoch. What leaves its nodes is named by a manifest, but no ``HEAD``: the job
            never goes back to it.
        parent: the checkpoint that this one continues.
        ranks: for ``leaving``, those that will not be on this node any more.
    """

    job: JobId
    epoch: Epoch
    cut: int
    kind: Literal["live", "suspend", "full", "leaving", "final"]
    deadline_s: float
    commit: tuple[NodeParts, ...] | None = None
    parent: CheckpointId | None = None
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_positive("deadline_s", self.deadline_s)
        if self.ranks and self.kind != "leaving":
            raise ModelError(
                f"Ranks were named for a checkpoint of the kind {self.kind}.",
                code="model.checkpoint",
                remedy="Name them for leaving.",
            )
        if self.commit is None:
            return
        ranks = sorted(state.rank for parts in self.commit for state in parts.states)
        if self.kind != "final" and (not ranks or ranks != list(range(len(ranks)))):
            raise ModelError(
                "A commit needs the parts of every rank, each once.",
                code="model.commit",
                remedy="Pass what all nodes of the job have written at this cut.",
            )


@dataclass(frozen=True, slots=True)
class CheckpointResult(Shape):
    """What was written.

    Attributes:
        parts: this node's, where it was asked to write.
        checkpoint: the committed one, where it was asked to commit.
        stored_bytes: bytes added to the store.
        total_bytes: bytes that the parts refer to.
        memory_bytes: of the smallest device of the job on this node; 0 where nobody knows.
    """

    parts: NodeParts | None = None
    checkpoint: CheckpointId | None = None
    stored_bytes: int = 0
    total_bytes: int = 0
    memory_bytes: int = 0
    timings_ms: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class TransferInput(Shape):
    """Bring the chunks of a checkpoint to this node, as far as they are missing.

    Attributes:
        sources: where to ask, in this order: ids of nodes, or ``store`` for the object store.
        ahead: the job still runs at the source and a later checkpoint will follow (pre-copy).
        tenant: whose chunks they are.
        ranks: whose parts are needed here; empty for all, and with `keeps` for none.
        spec: with `placement` and `ahead`: the restore that will follow is made ready too, as far as that is possible
            before the job is stopped: the volume's base, the shim, device proxies that reach one another.
        placement: of that restore.
        keeps: with `spec`: that restore keeps the processes that are here (`RestoreInput.cut`). Refused with
            `RuntimeCode.UNSUITABLE` where they cannot be kept.
    """

    job: JobId
    epoch: Epoch
    checkpoint: CheckpointId
    sources: tuple[NodeId | Literal["store"], ...]
    deadline_s: float
    ahead: bool = False
    tenant: TenantId = field(default_factory=lambda: TenantId("default"))
    ranks: tuple[int, ...] = ()
    spec: JobSpec | None = None
    placement: Placement | None = None
    keeps: bool = False

    def __post_init__(self) -> None:
        _check_positive("deadline_s", self.deadline_s)
        if (self.spec is None) != (self.placement is None) or (self.spec is not None and not self.ahead):
            raise ModelError(
                "`spec` and `placement` make a restore ready: both, and ahead of it.", code="model.transfer"
            )


@dataclass(frozen=True, slots=True)
class TransferResult(Shape):
    """What was missing, all of which is here now and verified."""

    chunks: int
    bytes: int
    timings_ms: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class RestoreInput(Shape):
    """Make this node's part of a job from a checkpoint, and leave it paused until `attend`.

    Attributes:
        beside: parts of older epochs on this node are left as they are: the job is held there and goes on there
            should this epoch not come to count. The job's `HEAD` decides, then `stop` ends the one or the other.
        cut: with `beside`, on a node where ranks stay: the finished cut at which the epoch before is held. Their
            processes go on in this one, with other devices; `checkpoint` is only what the job would go back to. 0 where
            the part is made from the checkpoint.
        come: with `cut`, of a job some of whose ranks change their node: `checkpoint` is of the kind ``leaving``. Ranks
            that come are made from it, and the job's directory here becomes that of all nodes. Refused with
            `RuntimeCode.UNSUITABLE` where that cannot be done in a directory that is in use.
    """

    job: JobId
    epoch: Epoch
    node: NodeId
    spec: JobSpec
    placement: Placement
    checkpoint: CheckpointId
    deadline_s: float
    beside: bool = False
    cut: int = 0
    come: bool = False

    def __post_init__(self) -> None:
        _check_positive("deadline_s", self.deadline_s)
        _check_assignment(self.spec, self.placement, self.node, self.epoch)
        if self.cut and not self.beside:
            raise ModelError("Processes are kept of a part that is held.", code="model.restore", remedy="Set `beside`.")
        if self.come and not self.cut:
            raise ModelError("Ranks come to others that stay.", code="model.restore", remedy="Set `cut`.")


@dataclass(frozen=True, slots=True)
class RestoreResult(Shape):
    """Where the restored ranks stand, counted again after the load."""

    ranks: tuple[RankState, ...]
    timings_ms: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class StopInput(Shape):
    """End all that this node has of a job up to this epoch. Nothing to end is success.

    Attributes:
        grace_s: seconds between the polite signal and the other; 0 for a job whose checkpoint is committed.
        only: this epoch, which has never counted, and not those before it: the job goes on there.
    """

    job: JobId
    epoch: Epoch
    reason: str
    grace_s: float = 0.0
    only: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.grace_s < float("inf"):
            raise ModelError(
                f"`grace_s` is {self.grace_s}.", code="model.seconds", remedy="Use a number of seconds from 0."
            )


@dataclass(frozen=True, slots=True)
class StopResult(Shape):
    """No process of the job up to this epoch is on the node, nor will one start: the next epoch may."""

    epoch: Epoch
    progress: Progress | None = None


class NodeRuntime(Protocol):
    """What a node does for jobs. Calls block, may come from several threads, and raise errors with a `code`."""

    def attend(self, request: AttendInput, report: Callable[[Progress], None]) -> AttendResult:
        """Runs the node's part of a job until it ends; `report` is called about once a second."""
        ...

    def barrier(self, request: BarrierInput) -> BarrierResult:
        """Stops at a cut, finishes it, or resumes."""
        ...

    def checkpoint(self, request: CheckpointInput) -> CheckpointResult:
        """Writes the node's parts of a checkpoint, or commits it."""
        ...

    def transfer(self, request: TransferInput) -> TransferResult:
        """Fetches and verifies missing chunks; goes on where an earlier call left off."""
        ...

    def restore(self, request: RestoreInput) -> RestoreResult:
        """Restores the node's part of a job, paused."""
        ...

    def stop(self, request: StopInput) -> StopResult:
        """Ends the node's part of a job."""
        ...


def _check_assignment(spec: JobSpec, placement: Placement, node: NodeId, epoch: Epoch) -> None:
    check_placement(spec, placement)
    if placement.epoch != epoch:
        raise ModelError(
            f"The placement is of epoch {placement.epoch}, but epoch {epoch} was named.",
            code="model.epoch",
            remedy="Send the placement of the epoch.",
        )
    if node not in placement.nodes:
        raise ModelError(
            f"Node {node} has no rank in this placement.", code="model.node", remedy="Ask the nodes of the placement."
        )


def _check_positive(name: str, seconds: float) -> None:
    if not 0 < seconds < float("inf"):
        raise ModelError(
            f"`{name}` is {seconds}.", code="model.seconds", remedy="Use a finite number of seconds above 0."
        )
