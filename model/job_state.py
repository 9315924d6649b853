"""The phases of a job, and which may follow which."""

from __future__ import annotations

from enum import StrEnum

from model.codec import one_of
from model.errors import ModelError


class JobPhase(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    """Waits for devices, new or after a loss or a preemption."""
    STARTING = "starting"
    """Has a placement; its ranks are being started or restored."""
    RUNNING = "running"
    SUSPENDING = "suspending"
    """A cut is being taken, after which the job gives up its devices."""
    SUSPENDED = "suspended"
    """Holds no device; a person, or the scheduler, lets it go on."""
    MOVING = "moving"
    """A cut is being taken, after which the job goes on elsewhere at the same width."""
    RESIZING = "resizing"
    """A cut is being taken, after which the job goes on at another width."""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing can follow."""
        return not TRANSITIONS[self]


_P = JobPhase
_ENDS = frozenset({_P.COMPLETED, _P.FAILED, _P.CANCELLED})

# Any phase with ranks may end, or fall back to queued when a node is lost: the last checkpoint is then restored.
TRANSITIONS: dict[JobPhase, frozenset[JobPhase]] = {
    _P.QUEUED: frozenset({_P.STARTING, _P.SUSPENDED, _P.FAILED, _P.CANCELLED}),
    _P.STARTING: frozenset({_P.RUNNING, _P.QUEUED, _P.SUSPENDING, _P.FAILED, _P.CANCELLED}),
    _P.RUNNING: frozenset({_P.SUSPENDING, _P.MOVING, _P.RESIZING, _P.QUEUED, *_ENDS}),
    _P.SUSPENDING: frozenset({_P.SUSPENDED, _P.RUNNING, _P.QUEUED, *_ENDS}),
    _P.SUSPENDED: frozenset({_P.QUEUED, _P.STARTING, _P.FAILED, _P.CANCELLED}),
    _P.MOVING: frozenset({_P.RUNNING, _P.QUEUED, *_ENDS}),
    _P.RESIZING: frozenset({_P.RUNNING, _P.QUEUED, *_ENDS}),
    _P.COMPLETED: frozenset(),
    _P.FAILED: frozenset(),
    _P.CANCELLED: frozenset(),
}
"""For each phase, those that may follow it."""


def check_transition(before: JobPhase, after: JobPhase) -> None:
    """Checks that `after` may follow `before`.

    Raises:
        ModelError: ``model.transition``.
    """
    following = TRANSITIONS[before]
    if after in following:
        return
    allowed = f"only {one_of(sorted(following))} may follow" if following else "nothing may follow"
    raise ModelError(
        f"A job that is {before} cannot become {after}: {allowed}.",
        code="model.transition",
        remedy="Look at the job's phase again before asking.",
    )
