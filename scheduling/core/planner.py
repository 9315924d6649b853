"""The decisions, in one total order: what is about to be missed, admission, who waits, who may grow.

The order of service is also the order of who gives way to whom, so that no two jobs ever take turns at each other's
expense. Nothing is disturbed before a place is proved that follows from it, and what is freed for a job is held for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from math import inf

from scheduling.core.actions import Action, Kind, Plan, Why
from scheduling.core.book import Book, arrival
from scheduling.core.devices import CLAIM, LEASE, NEVER_YET, URGENT
from scheduling.core.draining import drain
from scheduling.core.model import Job, Node, Pool, State, least_width, promise_of
from scheduling.core.moving import make_room
from scheduling.core.placing import Places, find, find_elsewhere, find_more, find_occupied, fits_empty
from scheduling.core.reclaiming import Reclaim, Reclaimer
from scheduling.core.service import lead_s, zero_slack
from scheduling.core.settings import BASIC, LENT, LEVELS, PREMIUM, STANDARD
from scheduling.core.waiting import HOPELESS, Queue, Round, gain_of

_Step = tuple[Places | Reclaim, Pool]
"""Free devices, or a way to make them so; and where."""

_ANY = 1 << 60
"""More devices than there are."""


class Planner:
    """Decides on a book, and records in it what it has decided."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.settings = book.settings
        self.now = 0.0
        self._actions: list[Action] = []
        self._turn = False
        self._asked: Container[str] = ()
        self._kept: dict[str, Job] = {}
        self._in_vain: dict[tuple[str, int, bool], list[int]] = {}
        self._round: Round | None = None

    def plan(self, now: float, asked: Container[str] = ()) -> Plan:
        """What is to be done at `now`; a clock that went back stands still. Who is `asked` for by a person, to move or
        to be resized, does not grow before that is answered.
        """
        book, self._asked = self.book, asked
        self.now = now = book.planned_at = max(now, book.planned_at)
        self._actions = []
        self._in_vain = {}
        urgent = self._timers()
        self._kept = self._keep_room() if book.arrived else {}
        for name in sorted(book.draining):
            drain(self, book.nodes[name])
        self._redeem()
        for job in sorted(urgent, key=lambda job: (job.rank, zero_slack(job, now), job.id)):
            self._rescue(job)
        if book.may_admit:
            self._admit()
        self._turn = now - book.turned_at >= self.settings.turn_every_s
        if self._turn:
            book.turned_at = now
        if book.waiting.count:
            self._serve()
        if now - book.grown_at >= self.settings.grow_every_s:
            book.grown_at = now
            self._grow()
        return Plan(tuple(self._actions), self._wake())

    def act(self, kind: Kind, job: Job, places: Places, why: Why, beneficiary: Job | None = None) -> None:
        """Adds to the plan what was recorded in the book."""
        places = dict(sorted(places.items(), key=_order)) if len(places) > 1 else dict(places)
        self._actions.append(Action(kind, job, places, why, beneficiary))

    # -- what is due ----------------------------------------------------------------------------------------------

    def _timers(self) -> list[Job]:
        book, now = self.book, self.now
        urgent: list[Job] = []
        last = None
        while book.timers and book.timers[0][0] <= now:
            timer = heapq.heappop(book.timers)
            if timer == last or not self._live(timer):
                continue
            last = timer
            _, kind, name, _ = timer
            if kind == LEASE:
                book.drain(name)
                continue
            job = book.jobs[name]
            if kind == URGENT:
                job.due = inf
                urgent.append(job)
            elif kind == CLAIM:
                book.drop_claim(job)
                if job.reserves:
                    book.turned_at = NEVER_YET  # whoever is on those nodes has run long enough now
                else:
                    book.cool(job, now + self.settings.again_s)
            else:
                book.ripen(job, now)
        return urgent

    def _live(self, timer: tuple[float, int, str, int]) -> bool:
        """Whether what a timer was set for is still so."""
        at, kind, name, stamp = timer
        if kind == LEASE:
            return name in self.book.nodes and name not in self.book.draining
        job = self.book.jobs.get(name)
        if job is None:
            return False
        if kind == URGENT:
            return job.stamp == stamp and job.due == at
        if kind == CLAIM:
            return bool(job.claim) and at == job.claim_until
        return job.changes == stamp

    def _redeem(self) -> None:
        """Jobs whose claims are complete get what was held for them."""
        for job in sorted(self.book.whole, key=lambda job: job.id):
            since = self.now - job.claimed_at
            places = self.book.redeem(job)
            self._hand(job, places, ("held", sum(places.values()), since))

    # -- levels ---------------------------------------------------------------------------------------------------

    def _rescue(self, job: Job) -> None:
        """Its slack is nearly used up: it gets its full width, whatever it takes of those below."""
        if job.width == job.ranks:
            return
        if job.claim or not self._obtain(job, self._pools(job), urgent=True):
            due = zero_slack(job, self.now) - lead_s(job, self.settings)
            self.book.call(job, max(self.now + self.settings.retry_s, due))

    def _keep_room(self) -> dict[str, Job]:
        """By pool, the job that has waited so long for its level to be promised that nobody behind it is admitted
        before: otherwise many small promises would always be in the way of a large one.
        """
        kept: dict[str, Job] = {}
        for arrived in self.book.arrived.islice(0, 8):
            job = self.book.jobs[arrived[3]]
            if self.now - job.ask.submitted < self.settings.age_s or job.state is State.HELD:
                continue
            for pool in self._pools(job):
                if pool.key not in kept and job.ranks <= pool.capacity and self._quota(job) is None:
                    kept[pool.key] = job
                    break
        return kept

    def _admit(self) -> None:
        """Promises their levels to those that run already, at full width, on what others left."""
        book = self.book
        book.may_admit = False
        fails = 0
        for arrived in list(book.lent):
            job = book.jobs[arrived[3]]
            assert job.pool is not None
            job.why = self._refusal(job, job.pool)
            if not job.why:
                book.admit(job, job.pool, self.now)
            else:
                fails += 1
                if fails >= self.settings.fails_per_rank:
                    return

    def _refusal(self, job: Job, pool: Pool) -> Why:
        """Why a job's level cannot be promised out of a pool now; empty if it can be."""
        amount = promise_of(job.ask)
        refused = self._quota(job)
        if refused is not None:
            return refused
        cap = self.settings.cap * pool.capacity * 100
        before = self._kept.get(pool.key)
        kept = promise_of(before.ask) if before is not None and arrival(before) < arrival(job) else 0
        if kept and before is not None and before.admitted is not None:
            kept = 0
        if job.ranks <= pool.capacity and (pool.hundredths + kept + amount <= cap or not pool.hundredths + kept):
            beside = pool.capacity - pool.fixed - (job.ranks if job.ask.tier == PREMIUM else 0)
            widest = least_width(job.ask) if job.ask.tier != PREMIUM else pool.widest[-1] if pool.widest else 0
            return ("beside", pool.key, widest, max(beside, 0)) if widest > beside else ()
        name = before.id if kept and before is not None else ""
        return ("cap", pool.key, pool.promised, amount / 100, cap / 100, name)

    def _quota(self, job: Job) -> Why | None:
        amount = promise_of(job.ask)
        tenant = job.tenant
        while tenant is not None:
            if tenant.quota is not None and tenant.hundredths + amount > tenant.quota * 100 + 1e-6:
                return ("quota", tenant.name, tenant.promised, amount / 100, tenant.quota)
            tenant = tenant.parent
        return None

    # -- who waits ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        book, now, settings = self.book, self.now, self.settings
        fails, tries = [0, 0, 0, 0], [0, 0, 0, 0]

        def seeks(rank: int) -> bool:
            return rank < BASIC or self._turn

        def worth(queue: Queue, pools: list[Pool]) -> bool:
            rank = queue.rank
            if tries[rank] >= settings.tries_per_rank:
                return False
            if seeks(rank) and fails[rank] < settings.fails_per_rank:
                return True
            return any(pool.free >= queue.least for pool in pools)

        self._round = turn = Round(book.waiting, book.pools, now, worth, again=self._turn)
        places = 0
        while places < settings.places_at_once:
            job = turn.next()
            if job is None:
                self._explain()
                break
            rank, pools = job.rank, self._pools(job)
            if self._never(job, pools):
                book.waiting.fail(job, HOPELESS)
                continue
            thorough = seeks(rank) and fails[rank] < settings.fails_per_rank
            if self._start(job, pools, thorough):
                places += 1
                turn.placed()
                continue
            tries[rank] += 1
            fails[rank] += thorough
            if self._turn and now - job.waits_since >= 2 * settings.age_s and rank == BASIC:
                self._reserve(job)
            if thorough or not seeks(rank):
                book.waiting.fail(job, gain_of(pools))
        self._round = None

    def _explain(self) -> None:
        """Who was not looked at has a reason all the same."""
        for job in self.book.waiting.unexplained():
            pools = self._pools(job)
            if not self._never(job, pools):
                self._block(job, pools)
            self.book.waiting.explained(job)

    @staticmethod
    def _never(job: Job, pools: list[Pool]) -> bool:
        """It fits nowhere, not even on an empty fleet."""
        for pool in pools:
            if fits_empty(pool, job.widths[0], job.unit):
                return False
        if pools:
            largest = max(pools, key=lambda pool: pool.devices)
            job.why = ("never", job.widths[0], job.unit, largest.devices, largest.size)
        else:
            job.why = ("no pool", *job.ask.pools)
        return True

    def _start(self, job: Job, pools: list[Pool], seeks: bool) -> bool:
        """Admits a waiting job, where there is room for its promise and a place where it starts at once; else starts it
        on what others leave.
        """
        if job.rank != LENT:
            return self._obtain(job, pools, seeks=seeks)
        refusal: Why = ()
        closed: list[Pool] = []
        for pool in pools:
            refused = self._refusal(job, pool)
            if refused:
                refusal = refusal or refused
                closed.append(pool)
                continue
            step = self._seek(job, job.ranks, job.ask.tier, [pool], seeks=seeks)
            if step is not None:
                self.book.admit(job, pool, self.now)
                self._take(job, step)
                return True
        job.why = refusal
        # Where it found no place with a promise it finds none without.
        return self._obtain(job, pools, closed, seeks=seeks)

    def _obtain(
        self, job: Job, pools: list[Pool], sought: list[Pool] | None = None, *, urgent: bool = False, seeks: bool = True
    ) -> bool:
        """Gives a job its full width, or claims that and makes others give way; False: nothing was changed. `sought`:
        the pools in which all of it is to be looked for, where these are not all.
        """
        step = self._seek(job, job.ranks, job.rank, pools if sought is None else sought, seeks=seeks)
        for width in reversed(job.widths) if urgent else ():
            # Half of its width is half of the loss.
            if step is None and job.width < width and 4 * width >= job.ranks:
                step = self._seek(job, width, job.rank, pools, urgent=True)
        if step is not None:
            self._take(job, step, urgent=urgent)
            return True
        if not job.width and len(job.widths) > 1 and self._start_narrow(job, pools):
            return True
        promise = job.why if job.rank == LENT and job.why and job.why[0] in ("quota", "cap", "beside") else ()
        self._block(job, pools, promise)
        return False

    @staticmethod
    def _block(job: Job, pools: list[Pool], promise: Why = ()) -> None:
        free, lower = max(((pool.free, pool.low) for pool in pools), default=(0, 0))
        job.why = ("blocked", job.ranks - job.width, free, lower if job.rank < BASIC else 0, *promise)

    def _seek(
        self, job: Job, width: int, rank: int, pools: list[Pool], *, urgent: bool = False, seeks: bool = True
    ) -> _Step | None:
        """A way to `width` devices for a job that is served as `rank`: free ones, else at the expense of others."""
        extra = width - job.width
        for pool in pools:
            found = find_more(pool, job, extra) if job.width else find(pool, extra, job.unit)
            if found is None and rank < BASIC and (holder := pool.reserver) is not None:
                self.book.drop_claim(holder)
                if self._round is not None:
                    self._round.reopen()
                found = find_more(pool, job, extra) if job.width else find(pool, extra, job.unit)
            if found is not None:
                return found, pool
        best: tuple[Reclaim, Pool] | None = None
        for pool in pools if seeks else ():
            way = None
            if job.unit > 1 and not job.width and self.settings.moves:
                way = make_room(self.settings, pool, job, self.now)
            # Where one found no way, nobody finds one in the same round who wants as much and is of its rank, or of a
            # lower one: he may take from fewer. An old basic job may take from others than ranks say, and so may one
            # that is to be admitted.
            vain = self._in_vain.setdefault((pool.key, job.unit, job.admitted is None), [_ANY] * (BASIC + 1))
            least = vain[BASIC] if rank == BASIC else min(vain[: rank + 1])
            if way is None and (rank < BASIC or self._turn) and (urgent or extra < least):
                way = Reclaimer(self.settings, self.book.waiting, job, extra, self.now, rank, urgent).find(pool)
                if way is None and not urgent:
                    vain[rank] = extra
            if way is not None and (best is None or way.cost < best[0].cost):
                best = way, pool
        return best

    def _reserve(self, job: Job) -> None:
        """Keeps for a job that has waited very long what becomes free on some nodes. One job of each pool at a time."""
        for pool in self._pools(job):
            places = find_occupied(pool, job.ranks, job.unit)
            if places is not None and pool.reserver is None:
                job.why = ("reserves", job.ranks)
                self.book.stake(job, places, self.now, self.settings.aged_quantum_s)
                return

    def _take(self, job: Job, step: _Step, *, urgent: bool = False) -> None:
        way, pool = step
        if isinstance(way, Reclaim) and way.victims:
            self._reclaim(job, way, pool, urgent)
            return
        places = way.places if isinstance(way, Reclaim) else way
        self._hand(job, places, ("level" if urgent else "free", sum(places.values()), pool.free, job.served > 0))

    def _pools(self, job: Job) -> list[Pool]:
        if job.pool is not None:
            return [job.pool]
        return [self.book.pools[key] for key in job.ask.pools if key in self.book.pools]

    def _start_narrow(self, job: Job, pools: list[Pool]) -> bool:
        """The greatest width that fits now: for a guaranteed job only one that is worth its pause, unless nodes went
        without which it cannot do better.
        """
        for pool in pools:
            least = LEVELS[job.rank] * job.ranks * 0.5 if fits_empty(pool, job.ranks, job.unit) else 0
            for width in reversed(job.widths[:-1]):
                if width <= pool.free and width >= least:
                    found = find(pool, width, job.unit)
                    if found is not None:
                        self._hand(job, found, ("narrow", width, pool.free, job.ranks))
                        return True
        return False

    def _hand(self, job: Job, found: Places, why: Why) -> None:
        """Gives free devices to a job that waits, or that is to be wider."""
        kind = "resize" if job.width else "place"
        job.why = ()
        self.book.give(job, found, self.now)
        self.act(kind, job, job.given, why)

    def _reclaim(self, job: Job, way: Reclaim, pool: Pool, urgent: bool) -> None:
        book, now = self.book, self.now
        free, width = pool.free, sum(way.places.values())
        why = ("gives way", job.id, job.rank, width, free, round(way.cost), way.tried, urgent)
        for victim, kept in way.victims.items():
            if way.moves:
                book.give(victim, kept, now, target=kept)
                self.act("move", victim, kept, ("makes room", job.id, width, free, round(way.cost)), job)
            elif kept:
                book.change(victim, kept, now)
                self.act("resize", victim, kept, why, job)
            else:
                book.stop(victim, now)
                self.act("preempt", victim, {}, why, job)
        job.why = ("claims", width, free, *(victim.id for victim in way.victims))
        book.stake(job, way.places, now)

    # -- who may grow ---------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        book, now = self.book, self.now
        for key in sorted(book.narrow):
            pool = book.pools[key]
            for rank, _, name in list(book.narrow[key].islice(0, self.settings.grows_at_once)):
                if pool.free <= 0:
                    break
                job = book.jobs[name]
                since = now - job.changed
                cooled = since >= (self.settings.cool_s[rank] if rank <= STANDARD else self.settings.grow_cool_s)
                if cooled and not job.claim and name not in self._asked:
                    self._grow_one(pool, job)

    def _grow_one(self, pool: Pool, job: Job) -> None:
        """The greatest width that there are devices for; on its own nodes, else on one other, else on several."""
        for width in reversed(job.widths):
            extra = width - job.width
            if extra <= 0:
                return
            if extra > pool.free:
                continue
            found = find_more(pool, job, extra)
            here = found is not None and all(node in job.given for node in found)
            moved = None if here else find_elsewhere(pool, job, width)
            if moved is not None:
                free = pool.free
                self.book.give(job, moved, self.now, target=moved)
                self.act("move", job, moved, ("idle elsewhere", width, free))
                return
            if found is not None:
                self._hand(job, found, ("idle", extra, pool.free))
                return

    def _wake(self) -> float | None:
        book, settings = self.book, self.settings
        while book.timers and not self._live(book.timers[0]):
            heapq.heappop(book.timers)
        times = [timer[0] for timer in book.timers[:1]]
        if book.whole:
            times.append(self.now)
        if book.waiting.count and settings.turn_every_s < 1e17:
            times.append(book.turned_at + settings.turn_every_s)
        if any(narrow and book.pools[key].free for key, narrow in book.narrow.items()):
            times.append(book.grown_at + settings.grow_every_s)
        return max(min(times), self.now) if times else None


def _order(item: tuple[Node, int]) -> str:
    return item[0].order
