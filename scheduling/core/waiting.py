"""Jobs that wait, in groups that fare alike: if the first of a group finds no place, none of it does.

A round takes one group after the other in the order of service, and looks at none that was tried in vain since
something changed, and at none for which too few devices are free: however many wait, only those cost anything that are
tried.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from typing import Any

from scheduling.core.model import Job, Pool, Tenant
from scheduling.core.service import share
from scheduling.core.settings import BASIC, STANDARD, Settings

Key = tuple[Any, ...]
"""By what jobs are ordered; the last part is a job's name."""

PARKED = -1
"""The ticket of a job that is not to be tried now."""

UNTRIED, HOPELESS = -1, -2
"""In place of the gain at which a group was tried in vain: it was not; it fits nowhere, whatever runs there."""


class Queue:
    """Lanes of groups of one rank that may run in the same pools and are as narrow at the least.

    Attributes:
        active: lanes with groups that might fare better than when they were last tried; `failed`: with others. A queue
            with neither, and a lane with no group, stays for the next job of its kind.
        seen: at a sum of the pools' `gain` that is less a failure counts no more.
    """

    __slots__ = ("active", "failed", "lanes", "least", "pools", "rank", "seen")

    def __init__(self, rank: int, pools: tuple[str, ...], least: int) -> None:
        self.rank, self.pools, self.least = rank, pools, least
        self.lanes: dict[Key, Lane] = {}
        self.active: dict[Lane, None] = {}
        self.failed: dict[Lane, None] = {}
        self.seen = 0

    def places(self, pools: dict[str, Pool]) -> list[Pool]:
        """Its pools, of those that there are."""
        return [pools[key] for key in self.pools if key in pools]


class Lane:
    """Groups of a queue in the order of service: all of them, or those of one tenant, priority and band of the basic
    tier. Only among such lanes does the order change with time.
    """

    __slots__ = ("band", "fresh", "priority", "queue", "tenant", "tried")

    def __init__(self, queue: Queue, job: Job, band: int) -> None:
        self.queue = queue
        self.tenant, self.priority, self.band = job.tenant, job.ask.priority, band
        self.fresh: list[Key] = []  # in order
        self.tried: list[Key] = []

    def after(self, order: Key | None, *, whole: bool) -> Key | None:
        """The next to be tried after one, after None the first; `whole`: also of those that were tried in vain."""
        found: Key | None = None
        for listed in (self.fresh, self.tried) if whole else (self.fresh,):
            at = 0 if order is None else bisect_right(listed, order)
            if at < len(listed) and (found is None or listed[at] < found):
                found = listed[at]
        return found


class Group:
    """Waiting jobs of one rank and shape, the first in order at the head of a heap.

    Attributes:
        failed_at: the sum of its pools' `gain` when its head was last tried in vain, `UNTRIED` or `HOPELESS`.
        order: of its head, by which it stands in a list of its lane, in `listed`.
    """

    __slots__ = ("failed_at", "heap", "key", "lane", "listed", "order")

    def __init__(self, key: Key, lane: Lane) -> None:
        self.key = key
        self.lane = lane
        self.heap: list[tuple[Key, int, Job]] = []
        self.failed_at = UNTRIED
        self.order: Key | None = None
        self.listed: list[Key] | None = None

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

    `count`: how many wait, those too that are not to be tried now. `queues`: those that have groups to be tried.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.queues: dict[Queue, None] = {}
        self.count = 0
        self._queue_of: dict[Key, Queue] = {}
        self._groups: dict[Key, Group] = {}
        self._heads: dict[str, Group] = {}
        self._hopeless: dict[Group, None] = {}
        self._unexplained: dict[Group, None] = {}
        self._tickets = 0

    def band(self, job: Job, now: float) -> int:
        """How much it has had up to `now`, in few steps."""
        served = job.served + job.rate * max(0.0, now - job.at)
        return sum(1 for border in self.settings.served_bands if served >= border)

    def add(self, job: Job) -> None:
        """A job waits from now on, or waits as something else."""
        self.remove(job)
        key, order = self._key(job)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key, self._lane(job))
        self._tickets += 1
        job.ticket = self._tickets
        self.count += 1
        heapq.heappush(group.heap, (order, job.ticket, job))
        if group.order is None or order < group.order:
            group.failed_at = UNTRIED
            self._settle(group)

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
            group = self._heads.get(job.id)
            if group is not None:
                self._settle(group)

    def head_of(self, job: Job) -> Job | None:
        """The first job of the group that a waiting job is in; None for one that is in none."""
        group = self._groups.get(self._key(job)[0])
        return group.head() if group is not None and job.ticket != PARKED else None

    def fail(self, job: Job, gain: int) -> None:
        """The head of a group was tried in vain: at this gain, or it is `HOPELESS`. One that is no head is ignored."""
        group = self._heads.get(job.id)
        if group is not None:
            group.failed_at = gain
            self._settle(group)

    def failed(self, pools: dict[str, Pool]) -> Iterator[tuple[Job, int]]:
        """Heads that are not tried again before something changes, with what `fail` was told of them."""
        gains = {queue: gain_of(queue.places(pools)) for queue in self._queue_of.values()}
        for group in self._heads.values():
            if group.failed_at in (HOPELESS, gains[group.lane.queue]):
                yield group.heap[0][2], group.failed_at

    def hope(self) -> None:
        """There are other nodes now: what fitted nowhere may fit."""
        for group in list(self._hopeless):
            self.revive(group)

    def revive(self, group: Group) -> None:
        """What was tried in vain before is to be tried again."""
        group.failed_at = UNTRIED
        if group.order is not None:
            self._settle(group)

    def unexplained(self) -> list[Job]:
        """Heads of groups that do not know yet why they wait."""
        return [group.heap[0][2] for group in self._unexplained]

    def explained(self, job: Job) -> None:
        """The head of a group knows now why it waits."""
        self._settle(self._heads[job.id])

    def refresh(self, queue: Queue, gain: int) -> None:
        """Groups that failed before the gain of their pools came to be this may fare better now."""
        if gain == queue.seen:
            return
        queue.seen = gain
        for lane in list(queue.failed):
            for order in list(lane.tried):
                group = self._heads[order[-1]]
                if group.failed_at != gain:
                    self._settle(group)

    def group_at(self, order: Key) -> Group | None:
        """The group whose head has this order now."""
        group = self._heads.get(order[-1])
        return group if group is not None and group.order == order else None

    # -- where groups stand -------------------------------------------------------------------------------------------

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

    def _lane(self, job: Job) -> Lane:
        pools = (job.pool.key,) if job.pool else job.ask.pools
        key = (job.rank, pools, job.widths[0])
        queue = self._queue_of.get(key)
        if queue is None:
            queue = self._queue_of[key] = Queue(*key)
        basic = job.rank == BASIC
        band = self.band(job, job.at) if basic else 0
        part: Key = (band, job.tenant.name, job.ask.priority) if basic else ()
        lane = queue.lanes.get(part)
        if lane is None:
            lane = queue.lanes[part] = Lane(queue, job, band)
        return lane

    def _settle(self, group: Group) -> None:
        """Puts a group where it belongs now that its head, or what is known of that, has changed."""
        if group.order is not None:
            self._take_out(group)
        job = group.head()
        if job is None:
            group.order = None
            del self._groups[group.key]
            return
        lane = group.lane
        queue = lane.queue
        group.order = order = group.heap[0][0]
        self._heads[job.id] = group
        if not job.why:
            self._unexplained[group] = None
        elif group.failed_at == HOPELESS:
            self._hopeless[group] = group.listed = None
            return
        if job.why and group.failed_at >= queue.seen:
            group.listed, lanes = lane.tried, queue.failed
        else:
            group.listed, lanes = lane.fresh, queue.active
        insort(group.listed, order)
        if len(group.listed) == 1:
            lanes[lane] = None
            self.queues[queue] = None

    def _take_out(self, group: Group) -> None:
        order, listed, lane = group.order, group.listed, group.lane
        assert order is not None
        del self._heads[order[-1]]
        self._unexplained.pop(group, None)
        if listed is None:
            del self._hopeless[group]
            return
        del listed[bisect_left(listed, order)]
        if not listed:
            queue = lane.queue
            del (queue.active if listed is lane.fresh else queue.failed)[lane]
            if not queue.active and not queue.failed:
                del self.queues[queue]


class Round:
    """The groups that are to be tried in one round, one after the other, in the order of service.

    `worth` says of a queue and its pools whether its groups are to be looked at now. `again`: of the basic tier also
    those that were tried in vain are, since it is their turn to have others give way.
    """

    def __init__(
        self,
        waiting: Waiting,
        pools: dict[str, Pool],
        now: float,
        worth: Callable[[Queue, list[Pool]], bool],
        *,
        again: bool,
    ) -> None:
        self._waiting, self._now, self._worth, self._again = waiting, now, worth, again
        self._places: dict[Queue, list[Pool]] = {}
        self._used: dict[Tenant, tuple[float, ...]] = {}
        self._heap: list[tuple[Key, Key, Lane, Key | None]] = []
        self._aside: list[tuple[Lane, Key | None]] = []
        self._last: tuple[Group, Key] | None = None
        for queue in list(waiting.queues):
            places = self._places[queue] = queue.places(pools)
            waiting.refresh(queue, gain_of(places))
            lanes = {**queue.active, **queue.failed} if again and queue.rank == BASIC else queue.active
            if worth(queue, places):
                for lane in lanes:
                    self._push(lane, None)
            else:
                self._aside += [(lane, None) for lane in lanes]

    def next(self) -> Job | None:
        """The first job of the next group; None: no other is to be tried."""
        if self._last is not None:
            group, order = self._last
            self._push(group.lane, order)
            self._last = None
        while self._heap:
            _, order, lane, before = heapq.heappop(self._heap)
            if not self._worth(lane.queue, self._places[lane.queue]):
                self._aside.append((lane, before))
                continue
            group = self._waiting.group_at(order)
            if group is None:
                self._push(lane, order)
                continue
            self._last = group, order
            return group.heap[0][2]
        return None

    def placed(self) -> None:
        """A place was found for that job: the one that follows in its group is tried as well."""
        if self._last is not None:
            self._waiting.revive(self._last[0])

    def reopen(self) -> None:
        """Devices have become free: whom it was of no use to look at may be looked at."""
        aside, self._aside = self._aside, []
        for lane, before in aside:
            self._push(lane, before)

    def _push(self, lane: Lane, before: Key | None) -> None:
        order = lane.after(before, whole=self._again and lane.queue.rank == BASIC)
        if order is not None:
            heapq.heappush(self._heap, (self._key(lane, order), order, lane, before))

    def _key(self, lane: Lane, order: Key) -> Key:
        """Where a group stands among all."""
        if lane.queue.rank < BASIC:
            return (lane.queue.rank, *order)
        settings = self._waiting.settings
        if self._now - order[0] >= settings.age_s:
            return (BASIC, 0, -lane.priority, *order)
        used = self._used.get(lane.tenant)
        if used is None:
            used = self._used[lane.tenant] = share(lane.tenant, self._now, settings.usage_half_life_s)
        return (BASIC, 1, -lane.priority, lane.band, used, *order)


def gain_of(pools: list[Pool]) -> int:
    """A number that grows when somebody might succeed there who failed."""
    return sum(pool.gain for pool in pools)
