"""The events of v1, told apart by `type`.

A reader ignores fields that it does not know, so that adding one is no new version.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from model.errors import ModelError
from model.ids import CheckpointId, DeviceId, Epoch, EventId, JobId, NodeId, Step, TenantId
from model.job_spec import Tier
from model.job_state import JobPhase, check_transition
from model.placement import Placement


class Topic(StrEnum):
    """Where events are published. The version changes with what consumers have to understand."""

    JOB_EVENTS = "ergo.job-events.v1"
    DECISIONS = "ergo.decisions.v1"
    USAGE = "ergo.usage.v1"
    TELEMETRY = "ergo.telemetry.v1"
    DEAD_LETTERS = "ergo.dead-letters.v1"


def _utc(time: datetime) -> datetime:
    if time.utcoffset() != timedelta(0):
        raise ValueError("must be a time in UTC, such as 2026-01-31T12:00:00Z")
    return time


class _Shape(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class PlacementData(_Shape):
    """A placement, as consumers see it; unlike `model.placement.Placement` it may gain fields within v1.

    Attributes:
        devices: the devices used, in the order of their ranks.
        device_of_rank: for each logical rank, an index into `devices`.
    """

    devices: tuple[DeviceId, ...] = Field(min_length=1)
    device_of_rank: tuple[int, ...] = Field(min_length=1)

    @classmethod
    def of(cls, placement: Placement) -> PlacementData:
        """What is told of a placement; its epoch is that of the event."""
        return cls(devices=placement.devices, device_of_rank=placement.device_of_rank)


class JobPhaseChangedData(_Shape):
    """A job's phase changed.

    Attributes:
        before: None for the first event of a job, and where its workflow was set back: what it told before may not
            be true any more.
        after: the phase from now on.
        reason: why, as a sentence for people.
        step: the lowest step of any rank, when it happened.
        placement: where the job is from now on; None where it holds no device.
        exit_code: the job's, where it ended by itself.
        tier, width: what the job asks for: its level, and devices at its full width.
        held: a person holds it; where it has no device, its hour stands still.
        delivered_ms: device time, in milliseconds, that it had got until then; what was lost with a node is not in it.
            With these four and the decisions to admit, the accounts of the scheduler can be made anew.
    """

    before: JobPhase | None
    after: JobPhase
    reason: str = Field(min_length=1)
    step: Step
    placement: PlacementData | None = None
    exit_code: int | None = None
    tier: Tier | None = None
    width: int | None = Field(default=None, ge=1)
    held: bool = False
    delivered_ms: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _legal(self) -> Self:
        if self.before is not None:
            check_transition(self.before, self.after)
        return self


class CheckpointCommittedData(_Shape):
    """A checkpoint became the job's newest.

    Attributes:
        step: the lowest step of any rank at the cut.
        stored_bytes: what it added to the store.
        total_bytes: what it refers to.
        duration_ms: from the request to the commit.
        stopped_ms: how long the job's devices stood still for it.
    """

    checkpoint: CheckpointId
    kind: Literal["live", "suspend", "full"]
    step: Step
    stored_bytes: int = Field(ge=0)
    total_bytes: int = Field(ge=0)
    duration_ms: int = Field(ge=0)
    stopped_ms: int = Field(ge=0)


class DecisionData(_Shape):
    """The scheduler decided something about a job.

    Attributes:
        reason: why, as a sentence for people.
        policy: name and version of the policy.
        state_digest: hash of the state that it decided on; from it audit decides again.
        placement: the new one, where the action gives one.
        admitted_at: with ``admit``: since when the job's level is promised, in UTC.
    """

    action: Literal["admit", "reject", "place", "preempt", "migrate", "resize"]
    reason: str = Field(min_length=1)
    policy: str = Field(min_length=1)
    state_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    placement: PlacementData | None = None
    admitted_at: Annotated[datetime, AfterValidator(_utc)] | None = None

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if (self.placement is not None) != (self.action in ("place", "migrate", "resize")):
            raise ModelError(
                f"A decision to {self.action} {'has no' if self.placement else 'needs a'} placement.",
                code="events.decision",
                remedy="Give one to place, migrate and resize, and only to these.",
            )
        return self


class SharingIncidentData(_Shape):
    """Ranks of a job that share a device: something went another way than it should. No number of theirs is touched.

    Attributes:
        kind: ``time-limit``: a rank waited for others of its device until a time limit ended that; ``mismatch``:
            results that were taken for equal, were computed by each rank to make sure, and were not.
        node: where.
        count: how often since the last such event of this kind, node and epoch.
        total: how often in this epoch on this node.
        unshared: with ``mismatch``: the operators that are not shared any more there, each rank runs them by itself.
        reason: what that means, as a sentence for people.
    """

    kind: Literal["time-limit", "mismatch"]
    node: NodeId
    count: int = Field(ge=1)
    total: int = Field(ge=1)
    unshared: tuple[str, ...] = ()
    reason: str = Field(min_length=1)


class DeviceReport(_Shape):
    """One accelerator, as its node sees it.

    Attributes:
        busy: share of the last interval in which it computed, 0 to 1; None where nobody measures it.
        memory_used_bytes: None where nobody measures it.
    """

    id: DeviceId
    accelerator: str
    busy: float | None = Field(default=None, ge=0, le=1)
    memory_used_bytes: int | None = Field(default=None, ge=0)
    memory_total_bytes: int | None = Field(default=None, ge=0)


class JobReport(_Shape):
    """A job's part on a node.

    Attributes:
        step: the lowest step of the node's ranks.
        device_ms: device time delivered in this epoch, in milliseconds, over all devices of the node.
    """

    job: JobId
    epoch: Epoch
    step: Step
    device_ms: int = Field(ge=0)
    loss: float | None = None


class HostReport(_Shape):
    """The host of a node. `load_1m` is the kernel's load average over a minute; sizes in bytes."""

    cores: int = Field(ge=1)
    load_1m: float = Field(ge=0)
    memory_total_bytes: int = Field(ge=0)
    memory_available_bytes: int = Field(ge=0)
    disk_free_bytes: int = Field(ge=0)


class NodeReportedData(_Shape):
    """How a node is doing. The latest report counts; a missing one is missed by nobody."""

    node: NodeId
    devices: tuple[DeviceReport, ...]
    jobs: tuple[JobReport, ...]
    host: HostReport


class CloudEvent(_Shape):
    """The context that every event has: CloudEvents 1.0 attributes. Subclasses add `id`, `subject`, `type` and `data`.

    Attributes:
        source: the cluster that tells it, as a URI reference such as ``/clusters/local``. `id` is unique within it.
        time: when it happened, in UTC.
    """

    topic: ClassVar[Topic]

    specversion: Literal["1.0"] = "1.0"
    source: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[!-~]+$")]
    time: Annotated[datetime, AfterValidator(_utc)]
    datacontenttype: Literal["application/json"] = "application/json"


class JobEvent(CloudEvent):
    """The context of an event about one job.

    Attributes:
        id: consumers deduplicate by it.
        subject: the job; events with the same one keep their order.
        tenant: the job's tenant (an extension attribute).
        epoch: the job's epoch (an extension attribute); consumers drop what is lower than they have seen.
    """

    id: EventId
    subject: JobId
    tenant: TenantId
    epoch: Epoch

    @model_validator(mode="after")
    def _of_one_job(self) -> Self:
        if self.id.job != self.subject:
            raise ModelError(
                f"Event {self.id} has the subject {self.subject}, which is another job.",
                code="events.subject",
                remedy="Use the job of the id.",
            )
        return self


class JobPhaseChanged(JobEvent):
    """See `JobPhaseChangedData`."""

    topic = Topic.JOB_EVENTS
    type: Literal["ergosphere.job.phase-changed.v1"] = "ergosphere.job.phase-changed.v1"
    data: JobPhaseChangedData


class CheckpointCommitted(JobEvent):
    """See `CheckpointCommittedData`."""

    topic = Topic.JOB_EVENTS
    type: Literal["ergosphere.checkpoint.committed.v1"] = "ergosphere.checkpoint.committed.v1"
    data: CheckpointCommittedData


class DecisionMade(JobEvent):
    """See `DecisionData`."""

    topic = Topic.DECISIONS
    type: Literal["ergosphere.decision.made.v1"] = "ergosphere.decision.made.v1"
    data: DecisionData


class SharingIncident(JobEvent):
    """See `SharingIncidentData`."""

    topic = Topic.JOB_EVENTS
    type: Literal["ergosphere.sharing.incident.v1"] = "ergosphere.sharing.incident.v1"
    data: SharingIncidentData


class NodeReported(CloudEvent):
    """See `NodeReportedData`.

    Attributes:
        id: ``node@incarnation/start/seq``: the agent's start, in milliseconds since 1970, and a number from 1 since.
        subject: the node; reports with the same one keep their order.
    """

    topic = Topic.TELEMETRY
    type: Literal["ergosphere.node.reported.v1"] = "ergosphere.node.reported.v1"
    id: Annotated[str, Field(pattern=r"^[a-z0-9.-]+@[1-9][0-9]*/[0-9]+/[1-9][0-9]*$", max_length=320)]
    subject: NodeId
    data: NodeReportedData

    @model_validator(mode="after")
    def _of_one_node(self) -> Self:
        if not (self.subject == self.data.node and self.id.startswith(f"{self.subject}/")):
            raise ModelError(
                f"Report {self.id} of {self.data.node} has the subject {self.subject}, which is another node.",
                code="events.subject",
                remedy="Use the same node in all three.",
            )
        return self


AnyJobEvent: TypeAlias = JobPhaseChanged | CheckpointCommitted | DecisionMade | SharingIncident
"""Any event of v1 that is about one job."""

Event: TypeAlias = Annotated[
    JobPhaseChanged | CheckpointCommitted | DecisionMade | SharingIncident | NodeReported, Field(discriminator="type")
]
"""Any event of v1."""

EVENT_TYPES: dict[str, type[Event]] = {
    "ergosphere.job.phase-changed.v1": JobPhaseChanged,
    "ergosphere.checkpoint.committed.v1": CheckpointCommitted,
    "ergosphere.decision.made.v1": DecisionMade,
    "ergosphere.sharing.incident.v1": SharingIncident,
    "ergosphere.node.reported.v1": NodeReported,
}
"""The class of each `type`."""
