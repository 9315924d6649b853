"""The policies that can be compared: ours, ours without what makes it possible, and four of the field's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from scheduling.core.actions import Plan
from scheduling.core.book import Book
from scheduling.core.model import Job
from scheduling.core.planner import Planner
from scheduling.core.settings import Settings
from scheduling.simulator.baselines import Fifo, LeastAttained, ShortestRemaining

NEVER_S = 1e18


class SimulatedPolicy(Protocol):
    """What the engine asks of a policy. It decides on the book, which the engine keeps up to date."""

    def plan(self, now: float) -> Plan:
        """What is to be done."""
        ...

    def arrived(self, job: Job, duration_s: float) -> None:
        """A job was submitted. Only an oracle looks at its duration."""
        ...

    def stopped(self, job: Job) -> None:
        """It has given up its devices, and waits."""
        ...

    def finished(self, job: Job) -> None:
        """It has ended."""
        ...

    def node_lost(self) -> None:
        """Jobs have lost devices; each is told of by `stopped` later."""
        ...


class Ours:
    """The live policy, unchanged."""

    def __init__(self, book: Book) -> None:
        self._planner = Planner(book)
        self.plan = self._planner.plan

    def arrived(self, job: Job, duration_s: float) -> None:
        """Nothing: all is in the book."""

    def stopped(self, job: Job) -> None:
        """Nothing: all is in the book."""

    def finished(self, job: Job) -> None:
        """Nothing: all is in the book."""

    def node_lost(self) -> None:
        """Nothing: all is in the book."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A policy by name.

    Attributes:
        elastic: jobs may run at less than full width.
        kills: who gives way is killed, and starts again from the checkpoint that it wrote by itself.
        tuned: the settings that suit it.
    """

    make: Callable[[Book], SimulatedPolicy]
    elastic: bool
    kills: bool
    what: str
    tuned: Callable[[Settings], Settings] = lambda settings: settings


def _reluctant(settings: Settings) -> Settings:
    """Where giving way loses up to an hour, no one gives way to his like: only lower tiers do to higher ones."""
    return replace(settings, turn_every_s=NEVER_S, age_s=NEVER_S, steal_slack_s=NEVER_S, again_s=600.0)


POLICIES: dict[str, Kind] = {
    "ours": Kind(Ours, True, False, "tiers, levels, preemption, migration and resize"),
    "restart": Kind(Ours, False, True, "the same without them: kills, restarts from hourly checkpoints", _reluctant),
    "fifo": Kind(Fifo, False, False, "first come, first served"),
    "backfill": Kind(lambda book: Fifo(book, skip=100), False, False, "first come; smaller jobs go ahead"),
    "las": Kind(LeastAttained, False, False, "least attained service first, in rounds of 300 s (Tiresias)"),
    "srtf": Kind(ShortestRemaining, False, False, "shortest remaining time first, durations known"),
}

REGION, FLEET = "region", "fleet"
MOVING = {
    REGION: "ours, and each region moves jobs between its clusters",
    FLEET: "the same, and the fleet moves jobs between regions",
}
"""What can be compared besides where there are several clusters; every other policy has each cluster by itself."""
