"""The events of v1, told apart by `type`.

A reader ignores fields that it does not know, so that adding one is no new version.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from model.errors import ModelError
from model.ids import CheckpointId, DeviceId, Epoch, EventId, JobId, Step, TenantId
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
        before: None for the first event of a job.
        after: the phase from now on.
        reason: why, as a sentence for people.
        step: the lowest step of any rank, when it happened.
        placement: where the job is from now on; None where it holds no device.
        exit_code: the job's, where it ended by itself.
    """

    before: JobPhase | None
    after: JobPhase
    reason: str = Field(min_length=1)
    step: Step
    placement: PlacementData | None = None
    exit_code: int | None = None

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
    """

    action: Literal["admit", "reject", "place", "preempt", "migrate", "resize"]
    reason: str = Field(min_length=1)
    policy: str = Field(min_length=1)
    state_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    placement: PlacementData | None = None

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if (self.placement is not None) != (self.action in ("place", "migrate", "resize")):
            raise ModelError(
                f"A decision to {self.action} {'has no' if self.placement else 'needs a'} placement.",
                code="events.decision",
                remedy="Give one to place, migrate and resize, and only to these.",
            )
        return self


class BaseEvent(_Shape):
    """The context of an event: CloudEvents 1.0 attributes. Subclasses add `type` and `data`.

    Attributes:
        id: unique together with `source`; consumers deduplicate by it.
        source: the cluster that tells it, as a URI reference such as ``/clusters/local``.
        subject: the job.
        time: when it happened, in UTC.
        tenant: the job's tenant (an extension attribute).
        epoch: the job's epoch (an extension attribute); consumers drop what is lower than they have seen.
    """

    topic: ClassVar[Topic]

    specversion: Literal["1.0"] = "1.0"
    id: EventId
    source: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[!-~]+$")]
    subject: JobId
    time: Annotated[datetime, AfterValidator(_utc)]
    tenant: TenantId
    epoch: Epoch
    datacontenttype: Literal["application/json"] = "application/json"

    @model_validator(mode="after")
    def _of_one_job(self) -> Self:
        if self.id.job != self.subject:
            raise ModelError(
                f"Event {self.id} has the subject {self.subject}, which is another job.",
                code="events.subject",
                remedy="Use the job of the id.",
            )
        return self


class JobPhaseChanged(BaseEvent):
    """See `JobPhaseChangedData`."""

    topic = Topic.JOB_EVENTS
    type: Literal["ergosphere.job.phase-changed.v1"] = "ergosphere.job.phase-changed.v1"
    data: JobPhaseChangedData


class CheckpointCommitted(BaseEvent):
    """See `CheckpointCommittedData`."""

    topic = Topic.JOB_EVENTS
    type: Literal["ergosphere.checkpoint.committed.v1"] = "ergosphere.checkpoint.committed.v1"
    data: CheckpointCommittedData


class DecisionMade(BaseEvent):
    """See `DecisionData`."""

    topic = Topic.DECISIONS
    type: Literal["ergosphere.decision.made.v1"] = "ergosphere.decision.made.v1"
    data: DecisionData


Event: TypeAlias = Annotated[JobPhaseChanged | CheckpointCommitted | DecisionMade, Field(discriminator="type")]
"""Any event of v1."""

EVENT_TYPES: dict[str, type[Event]] = {
    "ergosphere.job.phase-changed.v1": JobPhaseChanged,
    "ergosphere.checkpoint.committed.v1": CheckpointCommitted,
    "ergosphere.decision.made.v1": DecisionMade,
}
"""The class of each `type`."""
