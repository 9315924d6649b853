"""What people ask of a job: inputs and answer of its updates, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass

from model.errors import ModelError
from model.ids import CheckpointId, Step
from model.job_state import JobPhase
from model.shape import Shape

MOST_DEVICES = 1 << 31
"""No job has so many: a number beyond it is a slip, and none that JSON could hold for certain."""


@dataclass(frozen=True, slots=True)
class PreemptRequest(Shape):
    """Update ``preempt``: take a checkpoint, give up the devices, and hold the job until ``resume``.

    Attributes:
        wait: answer when it is done, not when it is accepted.
    """

    wait: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ResumeRequest(Shape):
    """Update ``resume``: let a held job go on as soon as there are devices; with `wait`, answer when it runs."""

    wait: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointRequest(Shape):
    """Update ``checkpoint``: take one while the job runs on; with `wait`, answer when it is committed."""

    wait: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MigrateRequest(Shape):
    """Update ``migrate``: go on at the node named `to`; answered when the scheduler agrees, with `wait` when done."""

    to: str
    wait: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ResizeRequest(Shape):
    """Update ``resize``: go on at the width `devices`, which is what the job asks for from then on.

    Answered when the scheduler agrees, with `wait` when it runs at that width.
    """

    devices: int
    wait: bool = False
    reason: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.devices < MOST_DEVICES:
            raise ModelError(f"A job cannot run on {self.devices} devices.", code="model.width")


@dataclass(frozen=True, slots=True)
class CancelRequest(Shape):
    """Update ``cancel``: end the job for good; with `wait`, answer when none of its processes is left."""

    wait: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class OperationResult(Shape):
    """Answer of an update: the phase at that moment, and a sentence for people."""

    phase: JobPhase
    message: str
    checkpoint: CheckpointId | None = None


@dataclass(frozen=True, slots=True)
class JobEnd(Shape):
    """Result of a job's workflow. A failed one ends with an error of the type ``job.failed`` and this as its detail.

    Attributes:
        final: checkpoint of the job directory as it was at the end.
    """

    phase: JobPhase
    reason: str
    step: Step
    exit_code: int | None = None
    final: CheckpointId | None = None
