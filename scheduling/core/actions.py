"""What the planner decides. Reasons are kept as codes with figures; `reasons` makes sentences of them when asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduling.core.model import Job
from scheduling.core.placing import Places

Kind = Literal["place", "resize", "move", "preempt"]
Why = tuple[object, ...]
"""A code of `reasons`, then its figures: names and numbers only."""


@dataclass(frozen=True, slots=True)
class Action:
    """One decision about one job.

    Attributes:
        kind: ``place`` a waiting job; ``resize`` or ``move`` a running one; ``preempt`` it.
        places: devices by node that it has when it is done, in the order of nodes; none for ``preempt``.
        beneficiary: whom it is for, where it is not for the job itself.
        why: reason with figures.
    """

    kind: Kind
    job: Job
    places: Places
    why: Why
    beneficiary: Job | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done now. `wake`: when to look again at the latest, even if nothing happens; None for never."""

    actions: tuple[Action, ...]
    wake: float | None
