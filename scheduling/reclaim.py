"""Which jobs give way: only when that makes the gang fit, the lowest tier, the fewest devices, the newest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from model.ids import NodeId
from scheduling.fitting import Gang
from scheduling.fleet import TIER_RANK, Rooms
from scheduling.state import JobState

_SINGLES = 64
_PRUNED = 64

Fits = Callable[[Sequence[JobState]], bool]


def victims_for(gang: Gang, rooms: Rooms, lower: Sequence[JobState]) -> tuple[JobState, ...] | None:
    """The jobs of `lower` to preempt, so that `gang` fits on `rooms` and what they hold; None where nothing helps.

    Nodes are chosen before victims, so that not many jobs stop for one: for every node that could hold the gang alone,
    the cheapest set of victims there; a single victim anywhere; else the smallest set over nodes.
    """
    ranked = sorted(lower, key=_newest_first)
    found: list[tuple[JobState, ...]] = []
    for free in rooms.values():
        class_ = _Class(gang, {node: len(devices) for node, devices in free.items()})
        here = [job for job in ranked if class_.of(job)]
        if here and class_.fits(here):
            found += class_.candidates(here)
    return min(found, key=_cost, default=None)


class _Class:
    """Free devices of one numerics class, as numbers by node: whether a set of victims is enough costs next to nothing.

    A node holds as many whole runs of neighbouring devices as its number allows. That is exact where all runs are as
    long as the longest, and never too hopeful.
    """

    def __init__(self, gang: Gang, free: dict[NodeId, int]) -> None:
        runs = gang.runs
        self._width, self._runs, self._run = gang.width, len(runs), max(runs)
        self._free = free
        self._slots = sum(number // self._run for number in free.values())
        self._most = max(free.values(), default=0)
        self._held: dict[str, Counter[NodeId]] = {}

    def of(self, job: JobState) -> Counter[NodeId]:
        """What a job holds in this class, by node."""
        name = job.notice.job
        if name not in self._held:
            self._held[name] = Counter(device.node for device in job.notice.devices if device.node in self._free)
        return self._held[name]

    def fits(self, victims: Sequence[JobState]) -> bool:
        """Whether the gang fits when `victims` have stopped."""
        more: Counter[NodeId] = Counter()
        for victim in victims:
            more.update(self.of(victim))
        slots, most = self._slots, self._most
        for node, number in more.items():
            total = self._free[node] + number
            slots += total // self._run - self._free[node] // self._run
            most = max(most, total)
        return slots >= self._runs or most >= self._width

    def candidates(self, ranked: Sequence[JobState]) -> Iterator[tuple[JobState, ...]]:
        """Sets of victims that are enough; `ranked` all together are."""
        yield _smallest(ranked, self.fits)
        missing = self._width - sum(self._free.values())
        single = [victim for victim in ranked if self.of(victim).total() >= missing]
        yield from ((victim,) for victim in single[:_SINGLES] if self.fits([victim]))
        by_node: dict[NodeId, list[JobState]] = {}
        for victim in ranked:
            for node in self.of(victim):
                by_node.setdefault(node, []).append(victim)
        for node in sorted(by_node):
            fits_here = self._on(node)
            if fits_here(by_node[node]):
                yield _smallest(by_node[node], fits_here)

    def _on(self, node: NodeId) -> Fits:
        def fits_here(victims: Sequence[JobState]) -> bool:
            return self._free[node] + sum(self.of(victim)[node] for victim in victims) >= self._width

        return fits_here


def _smallest(ranked: Sequence[JobState], fits: Fits) -> tuple[JobState, ...]:
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


def _cost(victims: Sequence[JobState]) -> tuple[object, ...]:
    highest = max((-TIER_RANK[victim.notice.demand.tier] for victim in victims), default=0)
    devices = sum(len(victim.notice.devices) for victim in victims)
    oldest = min((_started(victim) for victim in victims), default=0.0)
    names = tuple(victim.notice.job for victim in victims)
    return highest, devices, len(victims), -oldest, names


def _newest_first(job: JobState) -> tuple[int, float, str]:
    return -TIER_RANK[job.notice.demand.tier], -_started(job), job.notice.job


def _started(job: JobState) -> float:
    return (job.changed_at or job.notice.demand.submitted_at).timestamp()
