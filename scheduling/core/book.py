"""What is known of a fleet, kept up to date by what happens. Every number that the planner asks for is at hand."""

from __future__ import annotations

from math import ceil, inf

from sortedcontainers import SortedList

from scheduling.core import capacity
from scheduling.core.devices import GAIN, NEVER_YET, URGENT, Devices, by_order, soft
from scheduling.core.model import Ask, Job, Node, Pool, State, Tenant, promise_of, rank_of
from scheduling.core.service import SHORT_HOUR_S, accrue, admit, close_hour, lead_s, spares_at, spend, zero_slack
from scheduling.core.settings import BASIC, LENT, PREMIUM, STANDARD, Settings


class Book(Devices):
    """Nodes, jobs, tenants and timers. Methods say what happened, at `now`, which never goes back.

    An unknown job or node raises `KeyError`: who calls knows what it has submitted.

    Attributes:
        arrived: guaranteed jobs that are not admitted, in the order in which they will be; `lent`: those of them that
            run at full width.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self.jobs: dict[str, Job] = {}
        self.tenants: dict[str, Tenant] = {}
        self.arrived: SortedList[tuple[int, int, float, str]] = SortedList()
        self.lent: SortedList[tuple[int, int, float, str]] = SortedList()
        self.grown_at = NEVER_YET
        self.turned_at = NEVER_YET
        self._narrow_key: dict[str, tuple[int, float, str]] = {}
        self._spared: dict[str, tuple[Pool, list[tuple[int, tuple[int, str]]]]] = {}

    # -- nodes ----------------------------------------------------------------------------------------------------

    def remove_node(self, name: str, now: float) -> list[Job]:
        """A node is gone, and with it what was there. Returns the jobs that lost devices: they give up the others."""
        node = self.nodes.pop(name)
        self.draining.discard(name)
        capacity.drop_node(node)
        self.drop_claims_on(node)
        self.waiting.hope()  # they fit no better, but what they are told is out of date
        hit = sorted(node.jobs, key=lambda job: job.id)
        for job in hit:
            if job.state in (State.RUNNING, State.CHANGING):
                self.stop(job, now)
            del job.given[node]
        node.jobs.clear()
        return hit

    # -- jobs -----------------------------------------------------------------------------------------------------

    def submit(self, ask: Ask, now: float) -> Job:
        """A job arrives.

        Raises:
            ValueError: a job of that name is there.
        """
        if ask.id in self.jobs:
            raise ValueError(f"Job {ask.id} is there already.")
        job = self.jobs[ask.id] = Job(ask, self.tenant(ask.tenant))
        job.at = job.changed = now
        if job.guaranteed:
            self.arrived.add(arrival(job))
            self.may_admit = True
        self.wait(job, now)
        return job

    def tenant(self, name: str) -> Tenant:
        """A tenant by its path; made when first asked for."""
        known = self.tenants.get(name)
        if known is None:
            above = name.rpartition("/")[0]
            known = self.tenants[name] = Tenant(name, self.tenant(above) if above else None)
        return known

    def set_quota(self, name: str, devices: float | None, weight: float = 1.0) -> None:
        """What may be promised to a tenant and those below it, in devices times level (None: anything), and its weight.

        Raises:
            ValueError: less than nothing, or no weight.
        """
        if (devices is not None and not 0 <= devices < inf) or not 0 < weight < inf:
            raise ValueError(f"Tenant {name}: a quota of {devices} devices or a weight of {weight} makes no sense.")
        tenant = self.tenant(name)
        tenant.quota, tenant.weight = devices, weight
        self._gain_all()
        self.may_admit = True

    def running(self, job: Job, now: float) -> None:
        """It does now what it was told: it runs on what it was given, and uses nothing else."""
        if job.state is not State.CHANGING:
            return
        if job.target is not None:
            for node in sorted(job.given, key=by_order):
                spare = job.given[node] - job.target.get(node, 0)
                if spare:
                    self.take(node, job, -spare)
            job.target = None
        job.state = State.RUNNING
        job.changed = now
        job.changes += 1
        self.rate(job, job.width, now)
        self._list(job, now)
        self.remind(job)

    def stopped(self, job: Job, now: float) -> None:
        """None of its processes is left; it waits again, or is held."""
        if job.state in (State.WAITING, State.HELD):
            return
        self.drop_claim(job)
        self._release(job, now)
        job.state = State.WAITING
        job.changed = now
        job.not_before = now + self.settings.again_s if job.rank >= LENT else now
        job.changes += 1
        self.wait(job, now)
        if job.holding:
            self.hold(job, True, now)

    def lost_work(self, job: Job, lost_s: float, now: float) -> None:
        """It goes back so many seconds at full width: what it did since its checkpoint was not delivered after all."""
        accrue(job, now)
        job.delivered = max(0.0, job.delivered - lost_s * job.ranks)
        job.served = max(0.0, job.served - lost_s * job.ranks)
        self._retime(job, now)

    def finish(self, job: Job, now: float) -> None:
        """It has ended, and nothing of it is left."""
        self.hold(job, False, now)
        self.drop_claim(job)
        self._release(job, now)
        self.waiting.remove(job)
        if job.admitted is not None:
            if now - job.window_start >= SHORT_HOUR_S:
                close_hour(job, now - job.window_start)
            self._promise(job, -1)
            self.may_admit = True
        else:
            self.arrived.discard(arrival(job))
        del self.jobs[job.id]

    def hold(self, job: Job, held: bool, now: float) -> None:
        """A person holds a job, or lets it go on. Its hour stands still in between.

        One that has devices is held as soon as it has `stopped`: whoever holds it tells it to (`stop`).
        """
        job.holding = held
        if held and job.state is State.WAITING:
            accrue(job, now)
            job.state = State.HELD
            self.drop_claim(job)
            self.waiting.remove(job)
            job.stamp += 1
            job.changes += 1
            job.due = inf
            job.why = ("held",)
            if job.admitted is not None:
                self.pools[job.promised_in].short -= job.ranks
        elif not held and job.state is State.HELD:
            job.window_start += now - job.at
            job.window_end += now - job.at
            job.at = now
            job.state = State.WAITING
            if job.admitted is not None:
                self.pools[job.promised_in].short += job.ranks
            self.wait(job, now)

    # -- what the planner does ----------------------------------------------------------------------------------------

    def wait(self, job: Job, now: float) -> None:
        """It waits for devices from now on."""
        job.waits_since = now
        job.key = zero_slack(job, now)
        if job.not_before > now:
            job.why = ("cooling", job.not_before)
            self.waiting.park(job)
        else:
            job.why = ()
            self.waiting.add(job)
        self._retime(job, now)
        self.remind(job)

    def cool(self, job: Job, until: float) -> None:
        """It is not placed before a time, unless its level needs it."""
        job.not_before = until
        if job.state is State.WAITING:
            job.why = ("cooling", until)
            self.waiting.park(job)
            self.timer(until, GAIN, job.id, job.changes)

    def ripen(self, job: Job, now: float) -> None:
        """Some time has passed over a job: it, or somebody whom it is in the way of, may fare better now."""
        if job.state is State.WAITING and job.not_before <= now and not job.claim:
            self.waiting.add(job)
        for key in [job.pool.key] if job.pool else job.ask.pools:
            if key in self.pools:
                self.pools[key].gain += 1

    def admit(self, job: Job, pool: Pool, now: float) -> None:
        """Its level is promised from now on, out of the capacity of a pool, in which it stays."""
        self.arrived.discard(arrival(job))
        self.lent.discard(arrival(job))
        job.pool = pool
        counted = list(job.given.items()) if job.state is not State.STOPPING else []
        for node, count in counted:
            soft(node, job.rank, -count)
        accrue(job, now)
        admit(job, now)
        job.promised_in = pool.key
        job.rank = rank_of(job.ask, admitted=True)
        for node, count in counted:
            soft(node, job.rank, count)
        self._promise(job, +1)
        if job.state is State.WAITING:
            job.key = zero_slack(job, now)
            self.waiting.add(job)
        if job.state is State.RUNNING:
            self._list(job, now)
        job.changes += 1
        self.remind(job)
        self._retime(job, now)

    def give(self, job: Job, places: dict[Node, int], now: float, target: dict[Node, int] | None = None) -> None:
        """Gives a job free devices, besides those that it has; `target`: all that it keeps, where that is not all."""
        self.waiting.remove(job)
        for node, count in places.items():
            self.take(node, job, count)
        self.change(job, target, now)

    def change(self, job: Job, target: dict[Node, int] | None, now: float) -> None:
        """Tells a job to go on with what it has, or with `target` only: the rest is free when it says `running`."""
        self._unlist(job)
        self.drop_claim(job)
        job.pool = next(iter(job.given)).pool
        job.target = target
        self._set_width(job, sum((target or job.given).values()))
        job.state = State.CHANGING
        job.changed = now
        job.changes += 1
        self.rate(job, 0, now)

    def stop(self, job: Job, now: float) -> None:
        """Tells a job to stop; its devices are free when it says `stopped`."""
        self._unlist(job)
        for node, count in job.given.items():
            soft(node, job.rank, -count)
        job.state = State.STOPPING
        job.changed = now
        job.changes += 1
        job.target = None
        self._set_width(job, 0)
        self.rate(job, 0, now)
        self.drop_claim(job)

    def rate(self, job: Job, devices: int, now: float) -> None:
        """So many devices deliver for it from now on."""
        accrue(job, now)
        spend(job.tenant, now, self.settings.usage_half_life_s)
        tenant: Tenant | None = job.tenant
        while tenant is not None:
            tenant.rate += devices - job.rate
            tenant = tenant.parent
        job.rate = devices
        self._retime(job, now)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _gain_all(self) -> None:
        for pool in self.pools.values():
            pool.gain += 1

    def _release(self, job: Job, now: float) -> None:
        self._unlist(job)
        self.rate(job, 0, now)
        for node in sorted(job.given, key=by_order):
            self.take(node, job, -job.given[node])
        job.target = None
        self._set_width(job, 0)

    def _set_width(self, job: Job, width: int) -> None:
        if job.admitted is not None:
            self.pools[job.promised_in].short += job.width - width
        job.width = width

    def _promise(self, job: Job, sign: int) -> None:
        amount = sign * promise_of(job.ask)
        pool = self.pools[job.promised_in]
        capacity.promise(pool, job.ask, sign)
        pool.short += sign * (job.ranks - job.width)
        pool.gain += sign < 0
        tenant: Tenant | None = job.tenant
        while tenant is not None:
            tenant.hundredths += amount
            if sign < 0 and tenant.quota is not None:
                self._gain_all()
            tenant = tenant.parent

    def _retime(self, job: Job, now: float) -> None:
        """Its zero-slack time has changed. Nothing can be done about one that is under way."""
        job.stamp += 1
        if job.state not in (State.WAITING, State.RUNNING):
            job.due = inf
            return
        at = zero_slack(job, now)
        self.call(job, max(now, at - lead_s(job, self.settings)) if at < 1e300 else inf)

    def call(self, job: Job, at: float) -> None:
        """It must be looked at then, because its slack is nearly used up; infinite: it need not."""
        job.due = at
        if at < 1e300:
            self.timer(at, URGENT, job.id, job.stamp)

    def remind(self, job: Job) -> None:
        """Sets the timers that follow from what it is and when that began, those that are not over yet."""
        settings, times = self.settings, list[float]()
        if job.state is State.RUNNING and job.rank > PREMIUM:
            times.append(job.changed + settings.cool_s[job.rank])
        if job.state is State.WAITING:
            if job.not_before > job.changed:
                times.append(job.not_before)
            if job.rank == BASIC:
                times.append(job.waits_since + settings.age_s)
        for at in times:
            if at > self.planned_at:
                self.timer(at, GAIN, job.id, job.changes)

    def _list(self, job: Job, now: float) -> None:
        self._unlist(job)
        job.spares_at = inf
        if job.width < job.ranks:
            job.key = zero_slack(job, now)
        elif job.rank == STANDARD:
            job.spares_at = spares_at(job, now, self.settings.enter_slack_s, self.settings.cool_s[STANDARD])
        self.enlist(job)

    def enlist(self, job: Job) -> None:
        """A job runs: below its full width, or fully without a promise."""
        assert job.pool is not None
        if job.width < job.ranks:
            key = self._narrow_key[job.id] = (job.rank, job.key, job.id)
            self.narrow[job.pool.key].add(key)
        elif job.rank == LENT:
            self.lent.add(arrival(job))
            self.may_admit = True
        elif job.spares_at < inf:
            at = ceil(job.spares_at)
            entries = [(count, (at, node.order)) for node, count in job.given.items()]
            for count, item in entries:
                job.pool.spares.add(count, item)
            self._spared[job.id] = job.pool, entries

    def _unlist(self, job: Job) -> None:
        if job.rank == LENT:
            self.lent.discard(arrival(job))
        key = self._narrow_key.pop(job.id, None)
        if key is not None and job.pool is not None:
            self.narrow[job.pool.key].remove(key)
        spared = self._spared.pop(job.id, None)
        if spared is not None:
            for count, item in spared[1]:
                spared[0].spares.remove(count, item)


def arrival(job: Job) -> tuple[int, int, float, str]:
    """The order in which guaranteed jobs are admitted."""
    return job.ask.tier, -job.ask.priority, job.ask.submitted, job.id
