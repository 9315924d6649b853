"""The decisions, in one total order: what is about to be missed, admission, who waits, who may grow.

The order of service is also the order of who gives way to whom, so that no two jobs ever take turns at each other's
expense. Nothing is disturbed before a place is proved that follows from it, and what is freed for a job is held for it.
"""

from __future__ import annotations

import heapq

from scheduling.core.actions import Action, Plan
from scheduling.core.book import CLAIM, GAIN, LEASE, URGENT, Book
from scheduling.core.draining import drain
from scheduling.core.model import Job, Pool, State
from scheduling.core.placing import Places, find, find_elsewhere, find_more
from scheduling.core.reclaiming import Reclaim, Reclaimer
from scheduling.core.service import zero_slack
from scheduling.core.settings import BASIC, LENT, LEVELS, STANDARD
from scheduling.core.waiting import gain_of

_RETRY_S = 15.0

_Step = tuple[Places | Reclaim, Pool]
"""Free devices, or a way to make them so; and where."""


class Planner:
    """Decides on a book, and records in it what it has decided."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.settings = book.settings
        self.now = 0.0
        self._actions: list[Action] = []
        self._turn = False

    def plan(self, now: float) -> Plan:
        """What is to be done at `now`."""
        self.now = now
        self._actions = []
        urgent = self._timers()
        for name in sorted(self.book.draining):
            drain(self, self.book.nodes[name])
        self._redeem()
        for job in sorted(urgent, key=lambda job: (job.rank, zero_slack(job, now), job.id)):
            self._rescue(job)
        if self.book.may_admit:
            self._admit()
        self._turn = now - self.book.turned_at >= self.settings.turn_every_s
        if self._turn:
            self.book.turned_at = now
        if self.book.waiting.count:
            self._serve()
        if now - self.book.grown_at >= self.settings.grow_every_s:
            self.book.grown_at = now
            self._grow()
        return Plan(tuple(self._actions), self._wake())

    def act(self, action: Action) -> None:
        """Adds to the plan what was recorded in the book."""
        self._actions.append(action)

    # -- what is due ----------------------------------------------------------------------------------------------

    def _timers(self) -> list[Job]:
        book, now = self.book, self.now
        urgent: list[Job] = []
        while book.timers and book.timers[0][0] <= now:
            _, kind, name, stamp = heapq.heappop(book.timers)
            if kind == LEASE:
                if name in book.nodes:
                    book.drain(name)
                continue
            job = book.jobs.get(name)
            if job is None:
                continue
            if kind == URGENT and job.stamp == stamp and job.state in (State.WAITING, State.RUNNING):
                urgent.append(job)
            elif kind == CLAIM and job.claim and now - job.claimed_at >= self.settings.hold_s - 1e-6:
                book.drop_claim(job)
                if job.state is State.WAITING:
                    job.not_before = now + self.settings.again_s
            elif kind == GAIN and job.changes == stamp:
                for key in [job.pool.key] if job.pool else job.ask.pools:
                    if key in book.pools:
                        book.pools[key].gain += 1
        return urgent

    def _redeem(self) -> None:
        """Jobs whose claims are complete get what was held for them."""
        for job in sorted(self.book.whole, key=lambda job: job.id):
            if job.state is State.WAITING:
                self._give(job, self.book.redeem(job), ("held", job.ranks))
            elif job.state is State.RUNNING:
                self._widen(job, self.book.redeem(job), ("held", job.ranks))

    # -- levels ---------------------------------------------------------------------------------------------------

    def _rescue(self, job: Job) -> None:
        """Its slack is nearly used up: it gets its full width, whatever it takes of those below."""
        if job.claim or job.width == job.ranks:
            return
        if not self._obtain(job, job.ranks, urgent=True):
            due = zero_slack(job, self.now) - self.settings.lead_s(job.rank)
            self.book.call(job, max(self.now + _RETRY_S, due))

    def _admit(self) -> None:
        """Promises their levels to those that run already, at full width, on what others left."""
        book = self.book
        book.may_admit = False
        fails = 0
        for arrival in list(book.arrived):
            job = book.jobs[arrival[3]]
            if job.state is State.RUNNING and job.width == job.ranks:
                pool = self._room(job)
                if pool is not None:
                    book.admit(job, pool, self.now)
                else:
                    fails += 1
                    if fails >= self.settings.fails_per_rank:
                        return

    def _room(self, job: Job) -> Pool | None:
        amount = LEVELS[job.ask.tier] * job.ranks
        tenant = job.tenant
        while tenant is not None:
            if tenant.quota is not None and tenant.promised + amount > tenant.quota + 1e-9:
                job.why = ("quota", tenant.name, tenant.promised, amount, tenant.quota)
                return None
            tenant = tenant.parent
        pools = [job.pool.key] if job.pool else job.ask.pools
        for key in pools:
            pool = self.book.pools.get(key)
            if pool is None or job.ranks > pool.capacity:
                continue
            room = self.settings.cap * pool.capacity - pool.promised
            if room + 1e-9 >= amount or pool.promised < 1e-9:
                return pool
            job.why = ("cap", pool.promised, amount, self.settings.cap * pool.capacity)
        return None

    # -- who waits ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        book, now = self.book, self.now
        fails = [0, 0, 0, 0]
        heads = book.waiting.heads(now, book.pools, again=self._turn)  # sorted, which is a heap
        places = 0
        while heads and places < self.settings.places_at_once:
            _, job, group = heapq.heappop(heads)
            rank = group.rank
            if fails[rank] >= self.settings.fails_per_rank:
                continue
            if job.claim or not (self._enter(job) or self._obtain(job, job.ranks)):
                fails[rank] += 1
                group.failed_at = gain_of(job, book.pools)
                continue
            places += 1
            following = group.head()
            if following is not None and following is not job:
                heapq.heappush(heads, (book.waiting.order(group, following, now), following, group))

    def _enter(self, job: Job) -> bool:
        """Admits a waiting job: there is room for its promise, and a place where it starts at once."""
        pool = self._room(job) if job.rank == LENT else None
        step = self._seek(job, job.ranks, job.ask.tier) if pool is not None else None
        if pool is None or step is None:
            return False
        self.book.admit(job, pool, self.now)
        self._take(job, step)
        return True

    def _obtain(self, job: Job, width: int, *, urgent: bool = False) -> bool:
        """Gives a job `width` devices in all, or claims them and makes others give way; False: nothing was changed."""
        if job.not_before > self.now and not urgent:
            job.why = ("cooling", job.not_before)
            return False
        step = self._seek(job, width, job.rank)
        if step is None and urgent:
            step = self._seek(job, width, job.rank, urgent=True)
        if step is not None:
            self._take(job, step)
            return True
        if not job.width and len(job.widths) > 1:
            return self._start_narrow(job, self._pools(job))
        self._wait_why(job, width - job.width, self._pools(job))
        return False

    def _seek(self, job: Job, width: int, rank: int, *, urgent: bool = False) -> _Step | None:
        """A way to `width` devices for a job that is served as `rank`: free ones, else at the expense of others."""
        extra = width - job.width
        pools = self._pools(job)
        for pool in pools:
            found = find_more(pool, job, extra) if job.width else find(pool, extra, job.unit)
            if found is not None:
                return found, pool
        best: tuple[Reclaim, Pool] | None = None
        for pool in pools if rank < BASIC or self._turn else ():
            way = Reclaimer(self.settings, self.book.waiting, job, extra, self.now, rank, urgent).find(pool)
            if way is not None and (best is None or way.cost < best[0].cost):
                best = way, pool
        return best

    def _take(self, job: Job, step: _Step) -> None:
        way, pool = step
        if isinstance(way, Reclaim):
            self._reclaim(job, way, pool)
        else:
            self._hand(job, way, ("free", sum(way.values()), pool.free))

    def _pools(self, job: Job) -> list[Pool]:
        if job.pool is not None:
            return [job.pool]
        return [self.book.pools[key] for key in job.ask.pools if key in self.book.pools]

    def _start_narrow(self, job: Job, pools: list[Pool]) -> bool:
        """The greatest width that fits now: for a guaranteed job only one that is worth its pause."""
        least = LEVELS[job.rank] * job.ranks * 0.5
        for pool in pools:
            for width in reversed(job.widths[:-1]):
                if width <= pool.free and width >= least:
                    found = find(pool, width, job.unit)
                    if found is not None:
                        return self._hand(job, found, ("narrow", width, job.ranks))
        self._wait_why(job, job.ranks, pools)
        return False

    def _hand(self, job: Job, found: Places, why: tuple[object, ...]) -> bool:
        if job.width:
            self._widen(job, found, why)
        else:
            self._give(job, found, why)
        return True

    def _give(self, job: Job, found: Places, why: tuple[object, ...]) -> None:
        self.book.give(job, found, self.now)
        self.act(Action("place", job, dict(job.given), why))

    def _widen(self, job: Job, found: Places, why: tuple[object, ...]) -> None:
        self.book.give(job, found, self.now)
        self.act(Action("resize", job, dict(job.given), why))

    def _reclaim(self, job: Job, way: Reclaim, pool: Pool) -> None:
        book, now = self.book, self.now
        free = pool.free
        for victim, kept in way.victims.items():
            why = ("gives way", job, sum(way.places.values()), free)
            if kept:
                book.change(victim, kept, now)
                self.act(Action("resize", victim, kept, why, job))
            else:
                book.stop(victim, now)
                self.act(Action("preempt", victim, {}, why, job))
        job.why = ("claims", sum(way.places.values()), free, tuple(victim.id for victim in way.victims))
        book.stake(job, way.places, now)

    def _wait_why(self, job: Job, width: int, pools: list[Pool]) -> None:
        if not pools:
            job.why = ("no pool", job.ask.pools)
        elif all(width > pool.devices for pool in pools):
            job.why = ("never", width, max(pool.devices for pool in pools))
        else:
            job.why = ("blocked", width, max(pool.free for pool in pools))

    # -- who may grow ---------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        book, now = self.book, self.now
        for key in sorted(book.narrow):
            pool = book.pools[key]
            tried = 0
            for rank, _, name in list(book.narrow[key].islice(0, self.settings.grows_at_once)):
                if pool.free <= 0:
                    break
                job = book.jobs[name]
                cooled = now - job.changed >= self.settings.grow_cool_s or rank <= STANDARD
                if cooled and not job.claim and now - job.changed >= self.settings.cool_s[rank]:
                    tried += 1
                    self._grow_one(pool, job)

    def _grow_one(self, pool: Pool, job: Job) -> None:
        for width in reversed([width for width in job.widths if width > job.width]):
            extra = width - job.width
            if extra > pool.free:
                continue
            found = find_more(pool, job, extra)
            if found is not None and all(node in job.given for node in found):
                return self._widen(job, found, ("idle", extra, pool.free))
            moved = find_elsewhere(pool, job, width)
            if moved is not None:
                self.book.give(job, moved, self.now, target=moved)
                self.act(Action("move", job, moved, ("idle elsewhere", width, pool.free)))
                return None
            if found is not None:
                return self._widen(job, found, ("idle", extra, pool.free))
        return None

    def _wake(self) -> float | None:
        timers = self.book.timers
        at = timers[0][0] if timers else None
        if self.book.waiting.count and self.settings.turn_every_s < 1e17:
            turn = self.book.turned_at + self.settings.turn_every_s
            at = turn if at is None else min(at, turn)
        if any(self.book.narrow.values()) and any(pool.free for pool in self.book.pools.values()):
            grow = self.book.grown_at + self.settings.grow_every_s
            at = grow if at is None else min(at, grow)
        return None if at is None else max(at, self.now)
