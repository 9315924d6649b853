"""The scheduling workflow of a cluster v1: its input, what it shows, and its own activities. See `model.control`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from model.control import AddressedDirective, InboxBatch
from model.ids import JobId
from model.shape import Shape


@dataclass(frozen=True, slots=True)
class ClusterInput(Shape):
    """Input of a cluster's scheduling workflow. Only `cluster` is given to the first run; a run hands on the rest.

    Attributes:
        digest: of the newest snapshot; empty before the first: `decide` then looks for one of an earlier workflow.
        inbox: what has come in and is not in the snapshot.
        undelivered: decided, and not yet told.
        wake_at: when to look again, at the latest; None for at once.
    """

    cluster: str
    digest: str = ""
    tick: int = 0
    inbox: tuple[InboxBatch, ...] = ()
    undelivered: tuple[AddressedDirective, ...] = ()
    wake_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ClusterView(Shape):
    """Answer of the query ``show`` of a cluster's scheduling workflow; the snapshot `digest` holds the rest."""

    cluster: str
    digest: str
    tick: int
    waiting_batches: int
    undelivered: int
    summary: str


# -- its activities ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecideInput(Shape):
    """One tick: what came in since the snapshot `digest`; `now` in UTC."""

    cluster: str
    tick: int
    digest: str
    inbox: tuple[InboxBatch, ...]
    now: datetime


@dataclass(frozen=True, slots=True)
class DecideResult(Shape):
    """The next snapshot's digest and what to tell which job. `wake_s`: when to look again, at the latest."""

    digest: str
    directives: tuple[AddressedDirective, ...]
    wake_s: float
    summary: str


@dataclass(frozen=True, slots=True)
class DeliverPlanInput(Shape):
    """Signals every job of a plan; a job whose workflow is gone is left out and told in the result."""

    cluster: str
    directives: tuple[AddressedDirective, ...]


@dataclass(frozen=True, slots=True)
class DeliverPlanResult(Shape):
    """Jobs whose workflows are gone."""

    gone: tuple[JobId, ...] = ()
