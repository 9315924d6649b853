"""The control plane v1: what a job's workflow, the cluster's scheduler and their activities tell one another."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from model.errors import ModelError
from model.ids import CheckpointId, DeviceId, Epoch, Generation, JobId, NodeId, Step, TenantId
from model.job_spec import Tier
from model.job_state import JobPhase
from model.manifest import NumericsClass, Pack
from model.orders import NodeOrder, QuotaOrder
from model.shape import Shape

# -- job → scheduler -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Demand(Shape):
    """What a job needs, as far as a scheduler must know.

    Attributes:
        ranks: virtual devices (`world_size` of the spec).
        ranks_per_group: neighbours that stay on one node.
        max_width: what it asks for: the widest that its spec allows, or what a person has asked for since.
        accelerator: model of the devices; None for any.
        widths: at which it can go on while it runs, ascending; with one or none it keeps `max_width`.
        measured: how much memory its ranks need is known, so that it may also start narrower than it asks for.
        numerics: the class it is bound to since it first ran; None before.
        submitted_at: in UTC.
    """

    name: str
    tenant: TenantId
    tier: Tier
    priority: int
    ranks: int
    ranks_per_group: int
    min_width: int
    max_width: int
    submitted_at: datetime
    accelerator: str | None = None
    numerics: NumericsClass | None = None
    widths: tuple[int, ...] = ()
    measured: bool = False


@dataclass(frozen=True, slots=True)
class JobNotice(Shape):
    """A job as it stands. Notices are states, not changes: of two of one job the higher (generation, number) counts.

    Attributes:
        number: from 1 within the generation.
        workflow_run: first execution run of the job's workflow.
        devices: what it holds now; empty when all of its processes are gone.
        wants: ``devices`` to run; ``move`` to run on `move_to` instead; ``resize`` to run on `width` devices instead;
            ``nothing`` otherwise.
        held: a person has preempted it; it wants nothing until a person resumes it.
        move_to: name of a node.
        width: number of devices; 0 where it wants no other one.
        request: names the person's request that ``move`` or ``resize`` comes from; the directive that answers
            repeats it.
        since: when the job came to stand as it does, in UTC.
        delivered_ms: device time, in milliseconds, that it had got until then; what was lost with a node is not in it.
    """

    job: JobId
    generation: Generation
    number: int
    workflow_run: str
    demand: Demand
    phase: JobPhase
    epoch: Epoch
    devices: tuple[DeviceId, ...] = ()
    wants: Literal["devices", "move", "resize", "nothing"] = "nothing"
    held: bool = False
    move_to: str | None = None
    request: str = ""
    since: datetime | None = None
    delivered_ms: int | None = None
    width: int = 0

    def __post_init__(self) -> None:
        if (self.move_to is not None) != (self.wants == "move"):
            raise ModelError("`move_to` belongs to a notice that wants to move.", code="model.notice")
        if (self.width > 0) != (self.wants == "resize"):
            raise ModelError("`width` belongs to a notice that wants to be resized.", code="model.notice")


# -- scheduler → job -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Directive(Shape):
    """What the scheduler wants of a job: the signal ``placement``.

    ``place``, ``migrate`` and ``resize`` name all devices that it has afterwards; ``preempt`` takes them back; ``wait``
    only tells why nothing happens yet; ``admit`` only tells that the job's level is promised; ``refuse`` answers a
    request that cannot be had; ``lost`` says that `nodes` are given up and their lease is over.

    Attributes:
        decision: unique id of the decision: the job ignores one that it has seen.
        reason: a sentence for people.
        policy: name and version of the policy.
        state_digest: hash of the state it decided on.
        device_of_rank: for each logical rank an index into `devices`. A job that knows better which of its ranks may
            share a device takes the devices only.
        request: the request that this answers.
        generation: with `notice`, the newest notice of the job when this was decided. A job that has sent a later one
            ignores ``place``, and ``migrate`` and ``resize`` that answer no request: the scheduler decides anew on
            that later notice, and may have given the devices away.
        admitted_at: since when the job's level is promised, in UTC; None as long as it is not. It comes with whatever
            the job is told next.
    """

    decision: str
    action: Literal["place", "preempt", "migrate", "resize", "wait", "refuse", "lost", "admit"]
    reason: str
    policy: str
    state_digest: str
    devices: tuple[DeviceId, ...] = ()
    device_of_rank: tuple[int, ...] = ()
    nodes: tuple[NodeId, ...] = ()
    request: str = ""
    generation: Generation = field(default_factory=lambda: Generation(0))
    notice: int = 0
    admitted_at: datetime | None = None

    def __post_init__(self) -> None:
        if bool(self.devices) != (self.action in ("place", "migrate", "resize")):
            raise ModelError(f"A directive to {self.action} with devices {self.devices}.", code="model.directive")


@dataclass(frozen=True, slots=True)
class AddressedDirective(Shape):
    """A directive and the job that it is for."""

    job: JobId
    workflow_run: str
    directive: Directive


# -- the scheduler's inbox -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeNotice(Shape):
    """A node as the cluster's observer sees it: here with a valid lease, or not.

    Attributes:
        alive: its lease is valid. False: it is over by a margin, or the node has left in order.
        devices: with their accelerator models, in order.
        jobs: (job, epoch) of what the node says it has.
        device_ms: for each of these the device time that it has delivered there in this epoch, in milliseconds. It
            changes all the time, and makes no notice news.
    """

    node: NodeId
    alive: bool
    devices: tuple[tuple[DeviceId, str], ...]
    numerics: NumericsClass
    jobs: tuple[tuple[JobId, Epoch], ...] = ()
    device_ms: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class JobClosed(Shape):
    """A job's workflow has closed without telling: terminated, timed out, or failed by itself."""

    job: JobId
    workflow_run: str
    status: str


@dataclass(frozen=True, slots=True)
class InboxBatch(Shape):
    """The signal ``inbox`` of a cluster's scheduler: what has come in about half a second."""

    jobs: tuple[JobNotice, ...] = ()
    nodes: tuple[NodeNotice, ...] = ()
    closed: tuple[JobClosed, ...] = ()
    node_orders: tuple[NodeOrder, ...] = ()
    quota_orders: tuple[QuotaOrder, ...] = ()


TELL_AGAIN = "notify"
"""`Directive.request` of a ``wait`` by which the scheduler asks a job for its notice, under a new number."""


# -- what people see of a job ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecisionView(Shape):
    """A decision about a job, with its reason, for people."""

    time: datetime
    action: str
    reason: str


@dataclass(frozen=True, slots=True)
class TransitionView(Shape):
    """A change of phase, for people.

    Attributes:
        down_ms: how long no rank ran, for a move or a resumption; with `parts_ms`, its parts by name.
    """

    time: datetime
    phase: JobPhase
    reason: str
    epoch: Epoch
    devices: tuple[DeviceId, ...] = ()
    step: Step = field(default_factory=lambda: Step(0))
    down_ms: float | None = None
    parts_ms: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class CheckpointView(Shape):
    """A committed checkpoint, for people. Sizes in bytes, times in milliseconds."""

    id: CheckpointId
    kind: Literal["live", "suspend", "full", "final"]
    time: datetime
    step: Step
    stored_bytes: int
    total_bytes: int
    stopped_ms: float


@dataclass(frozen=True, slots=True)
class JobView(Shape):
    """Answer of the query ``show``; also what ``ergo show --json`` prints.

    Attributes:
        pack: ``node``: the command starts its own ranks; `ranks` is 1 then.
        step: the lowest step of any rank that the workflow has heard of (transitions, checkpoints).
        placement: devices in the order of their ranks; empty where it holds none.
        gpu_fraction: device time delivered / asked for since submission; None before the first second.
        waiting: why it does not run, where it should.
    """

    id: JobId
    name: str
    tenant: TenantId
    tier: Tier
    ranks: int
    phase: JobPhase
    held: bool
    step: Step
    epoch: Epoch
    width: int
    placement: tuple[DeviceId, ...]
    device_of_rank: tuple[int, ...]
    submitted_at: datetime
    gpu_fraction: float | None
    preemptions: int
    moves: int
    recoveries: int
    checkpoints: tuple[CheckpointView, ...]
    decisions: tuple[DecisionView, ...]
    transitions: tuple[TransitionView, ...]
    waiting: str = ""
    exit_code: int | None = None
    failure: str = ""
    final: CheckpointId | None = None
    unpublished_events: int = 0
    pack: Pack = "rank"
    resizes: int = 0


# -- control activities of a job -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenJobInput(Shape):
    """Takes the job's record for this run of its workflow: a new generation. Idempotent by `workflow_run`."""

    job: JobId
    tenant: TenantId
    first_execution_run: str
    workflow_run: str


@dataclass(frozen=True, slots=True)
class OpenJobResult(Shape):
    """The generation, and what the record says of the job: after a reset the workflow believes otherwise.

    Attributes:
        cluster: whose scheduler places the job; the worker's setting.
        search_attributes: those of `model.names.SearchAttribute` that the server knows; setting another one would
            block the workflow.
    """

    generation: Generation
    epoch: Epoch
    nodes: tuple[NodeId, ...]
    checkpoint: CheckpointId | None
    step: Step
    cluster: str = "local"
    search_attributes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AwaitJobsInput(Shape):
    """Waits until these other jobs have ended; each with how it must have (``completed`` or ``any``)."""

    job: JobId
    after: tuple[tuple[JobId, Literal["completed", "any"]], ...]


@dataclass(frozen=True, slots=True)
class AwaitJobsResult(Shape):
    """They have ended; `refused` says which one did not as it must have, and is empty otherwise."""

    refused: str = ""


@dataclass(frozen=True, slots=True)
class AllocateEpochInput(Shape):
    """Hands out an epoch that nobody has had. A call that is repeated may hand out two: one is then never used."""

    job: JobId
    workflow_run: str


@dataclass(frozen=True, slots=True)
class AllocateEpochResult(Shape):
    """The epoch; it counts only when `AdvanceHeadInput` has made it."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class AdvanceHeadInput(Shape):
    """Makes an epoch the one that counts, on these nodes. From then on lower ones are fenced.

    Refused with `RuntimeCode.FENCED` where a higher epoch counts, or another run holds the generation.
    """

    job: JobId
    workflow_run: str
    epoch: Epoch
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class AdvanceHeadResult(Shape):
    """The epoch counts now; `before` are the nodes of the one that counted until then."""

    before: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class PublishInput(Shape):
    """Publishes events in order, each as its JSON document. `workflow_run` must hold the generation."""

    job: JobId
    workflow_run: str
    generation: Generation
    events: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PublishResult(Shape):
    """How many were acknowledged by the broker: all."""

    published: int


@dataclass(frozen=True, slots=True)
class NotifyInput(Shape):
    """Tells a cluster's scheduler; done when the scheduler's workflow has it in its history."""

    cluster: str
    notice: JobNotice
