"""A cut over all nodes of a job: where its communicators let go, and who has written what. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from model.errors import ModelError
from model.ids import NodeId, Step
from model.manifest import Pack, RankState, steps_of
from model.placement import Placement
from model.runtime import CollectiveTarget


def targets(ranks: Iterable[RankState]) -> tuple[CollectiveTarget, ...]:
    """Per communicator, the fewest collectives that any member has contributed to; 0 for a member without it.

    Args:
        ranks: where all ranks of the job stand after ``barrier stop``.

    Raises:
        ModelError: ``model.cut`` where two ranks disagree about the members of a communicator.
    """
    contributed: dict[str, dict[int, int]] = {}
    members: dict[str, frozenset[int]] = {}
    for state in ranks:
        for communicator in state.communicators:
            group = frozenset(communicator.members)
            if members.setdefault(communicator.name, group) != group:
                raise ModelError(f"Ranks disagree about the members of {communicator.name}.", code="model.cut")
            contributed.setdefault(communicator.name, {})[state.rank] = communicator.contributed
    return tuple(
        CollectiveTarget(name, min(counts.get(rank, 0) for rank in members[name]))
        for name, counts in sorted(contributed.items())
    )


def lowest_step(ranks: Iterable[RankState], pack: Pack = "rank") -> Step | None:
    """The lowest step of any rank; None where there is none."""
    return min(steps_of(ranks, pack), default=None)


def slowest(timings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """For each part, the longest that any node took, in milliseconds."""
    parts: dict[str, float] = {}
    for timing in timings:
        for name, value in timing.items():
            parts[name] = max(parts.get(name, 0.0), value)
    return parts


def first_node(placement: Placement) -> NodeId:
    """The node of rank 0, which commits."""
    return placement.device(0).node
