"""Jobs that wait, in groups that fare alike: if the first of a group finds no place, none of it does."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from scheduling.core.model import Job, Pool
from scheduling.core.service import share
from scheduling.core.settings import BASIC, STANDARD, Settings

Key = tuple[object, ...]
PARKED = -1
"""The ticket of a job that is not to be tried now."""


class Group:
    """Waiting jobs of one rank and shape, the first in order at the head of a heap.

    Attributes:
        failed_at: the sum of its pools' `gain` when its head was last tried in vain; -1 if it was not.
    """

    __slots__ = ("failed_at", "heap", "key", "rank")

    def __init__(self, key: Key, rank: int) -> None:
        self.key = key
        self.rank = rank
        self.heap: list[tuple[Key, int, Job]] = []
        self.failed_at = -1

    def head(self) -> Job | None:
        """The first, without those that wait no more."""
        heap = self.heap
        while heap:
            _, ticket, job = heap[0]
            if job.ticket == ticket:
                return job
            heapq.heappop(heap)
        return None


class Waiting:
    """All of them. A job is in at most one group; its `ticket` tells a live entry from an old one.

    `count`: how many wait, those too that are not to be tried now.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._groups: dict[Key, Group] = {}
        self._tickets = 0
        self.count = 0

    def band(self, job: Job, now: float) -> int:
        """How much it has had up to `now`, in few steps."""
        served = job.served + job.rate * max(0.0, now - job.at)
        return sum(1 for border in self._settings.served_bands if served >= border)

    def _key(self, job: Job) -> tuple[Key, Key]:
        """Its group, and its order there."""
        shape = (job.pool.key if job.pool else job.ask.pools, job.ranks, job.unit, job.widths)
        if job.rank == BASIC:
            key: Key = (BASIC, self.band(job, job.at), job.tenant.name, -job.ask.priority, shape)
            return key, (job.waits_since, job.id)
        if job.rank <= STANDARD:
            return (job.rank, shape), (-job.ask.priority, job.key, job.ask.submitted, job.id)
        # Tenants apart: one may be at its quota where another is not.
        return (
            (job.rank, job.ask.tier, job.tenant.name, shape),
            (job.ask.tier, -job.ask.priority, job.ask.submitted, job.id),
        )

    def add(self, job: Job) -> None:
        """A job waits from now on, or waits as something else."""
        self.remove(job)
        key, order = self._key(job)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key, job.rank)
        self._tickets += 1
        job.ticket = self._tickets
        self.count += 1
        head = group.head()
        if head is None or order < group.heap[0][0]:
            group.failed_at = -1
        heapq.heappush(group.heap, (order, job.ticket, job))

    def head_of(self, job: Job) -> Job | None:
        """The first job of the group that a waiting job is in; None for one that is in none."""
        group = self._groups.get(self._key(job)[0])
        return group.head() if group is not None and job.ticket != PARKED else None

    def park(self, job: Job) -> None:
        """A job waits, but for something else than its turn: it is not tried until it is added again."""
        self.remove(job)
        job.ticket = PARKED
        self.count += 1

    def remove(self, job: Job) -> None:
        """It waits no more."""
        if job.ticket:
            job.ticket = 0
            self.count -= 1

    def heads(self, now: float, pools: dict[str, Pool], *, again: bool = False) -> list[tuple[Key, Job, Group]]:
        """The first job of every group that might fare better than when it was last tried, in the order of service.

        With `again` every basic one: it is their turn to have others give way.
        """
        found: list[tuple[Key, Job, Group]] = []
        empty: list[Key] = []
        for key, group in self._groups.items():
            job = group.head()
            if job is None:
                empty.append(key)
            elif not job.why or group.failed_at != gain_of(job, pools) or (again and group.rank == BASIC):
                found.append((self.order(group, job, now), job, group))
        for key in empty:
            del self._groups[key]
        found.sort(key=_first)
        return found

    def order(self, group: Group, job: Job, now: float) -> Key:
        """Where the head of a group stands among the heads."""
        if group.rank == BASIC:
            aged = now - job.waits_since >= self._settings.age_s
            if aged:
                return (BASIC, 0, -job.ask.priority, job.waits_since, job.id)
            used = share(job.tenant, now, self._settings.usage_half_life_s)
            return (BASIC, 1, -job.ask.priority, group.key[1], used, job.waits_since, job.id)
        return (group.rank, *group.heap[0][0])

    def failed(self) -> Iterator[tuple[Job, int]]:
        """Heads of groups that were tried in vain, with the gain at which: for snapshots."""
        for group in self._groups.values():
            job = group.head()
            if job is not None and group.failed_at >= 0:
                yield job, group.failed_at

    def mark_failed(self, job: Job, gain: int) -> None:
        """The group of which `job` is the head was tried in vain."""
        self._groups[self._key(job)[0]].failed_at = gain


def gain_of(job: Job, pools: dict[str, Pool]) -> int:
    """A number that grows when the job might succeed where it failed."""
    if job.pool is not None:
        return job.pool.gain
    return sum(pools[key].gain for key in job.ask.pools if key in pools)


def _first(item: tuple[Key, Job, Group]) -> Key:
    return item[0]
