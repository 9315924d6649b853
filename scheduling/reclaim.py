"""Which jobs give way: only when that makes the gang fit, the lowest tier, the fewest devices, the newest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from model.control import Demand
from model.ids import DeviceId, NodeId
from scheduling.fitting import Gang
from scheduling.fleet import TIER_RANK, Fleet
from scheduling.state import JobState

_SINGLES = 64
_PRUNED = 64
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def victims_for(
    fleet: Fleet, demand: Demand, gang: Gang, base: Sequence[DeviceId], lower: Sequence[JobState]
) -> tuple[JobState, ...] | None:
    """The jobs of `lower` to preempt, so that `gang` fits on `base` and what they hold; None where nothing helps.

    Nodes are chosen before victims (see facts on blast radius): for every node that could hold the gang alone, the
    cheapest set of victims there; a single victim anywhere; else the smallest set over nodes.
    """
    ranked = sorted(lower, key=_newest_first)

    def fits(victims: Sequence[JobState]) -> bool:
        return fleet.find(demand, gang, [*base, *(d for victim in victims for d in victim.notice.devices)]) is not None

    if not ranked or not fits(ranked):
        return None
    candidates = list(_candidates(fleet, demand, gang, base, ranked, fits))
    return min(candidates, key=_cost)


def _candidates(
    fleet: Fleet,
    demand: Demand,
    gang: Gang,
    base: Sequence[DeviceId],
    ranked: Sequence[JobState],
    fits: Callable[[Sequence[JobState]], bool],
) -> Iterator[tuple[JobState, ...]]:
    yield _smallest(ranked, fits)
    missing = gang.width - fleet.of_its_kind(demand, base)
    single = [victim for victim in ranked if len(victim.notice.devices) >= missing]
    yield from ((victim,) for victim in single[:_SINGLES] if fits([victim]))
    for node, there in _by_node(ranked).items():
        item = fleet.nodes.get(node)
        if item is None or not item.alive or len(item.devices) < gang.width:
            continue
        if not any(item in pool.nodes for pool in fleet.suits(demand)):
            continue

        def fits_here(victims: Sequence[JobState], item: object = item) -> bool:
            usable = [*base, *(device for victim in victims for device in victim.notice.devices)]
            return fleet.find_on(demand, gang, item, usable) is not None  # type: ignore[arg-type]

        if fits_here(there):
            yield _smallest(there, fits_here)


def _smallest(ranked: Sequence[JobState], fits: Callable[[Sequence[JobState]], bool]) -> tuple[JobState, ...]:
    """The shortest prefix that fits, without those that are not needed."""
    low, high = 0, len(ranked)
    while low < high:
        middle = (low + high) // 2
        if fits(ranked[:middle]):
            high = middle
        else:
            low = middle + 1
    chosen = list(ranked[:low])
    # Those that hold the most, then the oldest, are spared first.
    for victim in sorted(chosen, key=lambda job: (-len(job.notice.devices), _started(job), job.notice.job))[:_PRUNED]:
        rest = [job for job in chosen if job is not victim]
        if fits(rest):
            chosen = rest
    return tuple(chosen)


def _by_node(ranked: Sequence[JobState]) -> dict[NodeId, list[JobState]]:
    found: dict[NodeId, list[JobState]] = {}
    for victim in ranked:
        for node in dict.fromkeys(device.node for device in victim.notice.devices):
            found.setdefault(node, []).append(victim)
    return {node: found[node] for node in sorted(found)}


def _cost(victims: Sequence[JobState]) -> tuple[object, ...]:
    highest = max((3 - TIER_RANK[victim.notice.demand.tier] for victim in victims), default=0)
    devices = sum(len(victim.notice.devices) for victim in victims)
    oldest = min((_started(victim) for victim in victims), default=_EPOCH)
    names = tuple(victim.notice.job for victim in victims)
    return highest, devices, len(victims), -oldest.timestamp(), names


def _newest_first(job: JobState) -> tuple[int, float, str]:
    return -TIER_RANK[job.notice.demand.tier], -_started(job).timestamp(), job.notice.job


def _started(job: JobState) -> datetime:
    return job.changed_at or job.notice.demand.submitted_at
