"""What is known of a fleet, kept up to date by what happens. Every number that the planner asks for is at hand."""

from __future__ import annotations

import heapq
from math import inf

from sortedcontainers import SortedList

from scheduling.core import capacity
from scheduling.core.model import Ask, Job, Node, Pool, State, Tenant, rank_of
from scheduling.core.service import SHORT_HOUR_S, accrue, admit, close_hour, spend, zero_slack
from scheduling.core.settings import BASIC, LENT, LEVELS, STANDARD, Settings
from scheduling.core.waiting import Waiting

URGENT, GAIN, CLAIM, LEASE = range(4)
"""Kinds of timers: a job's slack is nearly used up; since some time has passed over a job, somebody who failed may
succeed; a claim has been held long; a leased node is about to go."""


class Book:
    """Nodes, jobs, tenants and timers. Methods say what happened, at `now`, which never goes back.

    An unknown job or node raises `KeyError`: who calls knows what it has submitted.

    Attributes:
        arrived: guaranteed jobs that are not admitted, in the order in which they will be.
        narrow: by pool: running jobs below their full width, in the order in which they grow.
        whole: jobs whose claim is complete.
        draining: closed nodes that are to be emptied.
        timers: (time, kind, job, node or pool, stamp), a heap.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.pools: dict[str, Pool] = {}
        self.nodes: dict[str, Node] = {}
        self.jobs: dict[str, Job] = {}
        self.tenants: dict[str, Tenant] = {}
        self.waiting = Waiting(self.settings)
        self.arrived: SortedList[tuple[int, int, float, str]] = SortedList()
        self.narrow: dict[str, SortedList[tuple[int, float, str]]] = {}
        self.whole: set[Job] = set()
        self.timers: list[tuple[float, int, str, int]] = []
        self.draining: set[str] = set()
        self.may_admit = True
        self.grown_at = -1e18
        self.turned_at = -1e18
        self._narrow_key: dict[str, tuple[int, float, str]] = {}

    # -- nodes ----------------------------------------------------------------------------------------------------

    def add_node(self, name: str, pool_key: str, rack: str, size: int, now: float, until: float | None = None) -> Node:
        """A node is there. `until`: when it is taken away again, for a leased one."""
        pool = self.pools.get(pool_key)
        if pool is None:
            pool = self.pools[pool_key] = Pool(pool_key)
            self.narrow[pool_key] = SortedList()
        node = self.nodes[name] = capacity.new_node(pool, name, rack, size, until)
        if until is not None and until < 1e300:
            self.timer(max(now, until - self.settings.drain_lead_s), LEASE, name)
        pool.gain += 1
        self.may_admit = True
        return node

    def close(self, node: Node, closed: bool) -> None:
        """Whether nothing new may be placed on a node."""
        capacity.close(node, closed)
        node.pool.gain += 1

    def drain(self, name: str) -> None:
        """A node is to be emptied; nothing new is placed there."""
        self.close(self.nodes[name], True)
        self.draining.add(name)

    def remove_node(self, name: str, now: float) -> list[Job]:
        """A node is gone, and with it what was there. Returns the jobs that lost devices: they give up the others."""
        node = self.nodes.pop(name)
        self.draining.discard(name)
        capacity.drop_node(node)
        for claimant in sorted((job for job in self.jobs.values() if node in job.claim), key=lambda job: job.id):
            self.drop_claim(claimant)
        hit = sorted(node.jobs, key=lambda job: job.id)
        for job in hit:
            if job.state in (State.RUNNING, State.CHANGING):
                self.stop(job, now)
            del job.given[node]
        node.jobs.clear()
        return hit

    # -- jobs -----------------------------------------------------------------------------------------------------

    def submit(self, ask: Ask, now: float) -> Job:
        """A job arrives."""
        job = self.jobs[ask.id] = Job(ask, self.tenant(ask.tenant))
        job.at = job.changed = now
        if job.guaranteed:
            self.arrived.add(_arrival(job))
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

    def running(self, job: Job, now: float) -> None:
        """It does now what it was told: it runs on what it was given, and uses nothing else."""
        if job.state is not State.CHANGING:
            return
        if job.target is not None:
            for node in sorted(job.given, key=_order):
                spare = job.given[node] - job.target.get(node, 0)
                if spare:
                    self._take(node, job, -spare)
            job.target = None
        job.state = State.RUNNING
        job.changed = now
        job.changes += 1
        self.rate(job, job.width, now)
        self._list_narrow(job, now)
        self.remind(job)

    def stopped(self, job: Job, now: float) -> None:
        """None of its processes is left; it waits again."""
        self._release(job, now)
        job.state = State.WAITING
        job.changed = now
        job.not_before = now + self.settings.again_s if job.rank >= LENT else now
        job.changes += 1
        self.wait(job, now)

    def lost_work(self, job: Job, lost_s: float, now: float) -> None:
        """It goes back so many seconds at full width: what it did since its checkpoint was not delivered after all."""
        accrue(job, now)
        job.delivered = max(0.0, job.delivered - lost_s * job.ranks)
        job.served = max(0.0, job.served - lost_s * job.ranks)
        self._retime(job, now)

    def finish(self, job: Job, now: float) -> None:
        """It has ended, and nothing of it is left."""
        self.hold(job, False, now)
        self._release(job, now)
        self.waiting.remove(job)
        self.drop_claim(job)
        if job.admitted is not None:
            if now - job.window_start >= SHORT_HOUR_S:
                close_hour(job, now - job.window_start)
            self._promise(job, -1)
            self.may_admit = True
        else:
            self.arrived.discard(_arrival(job))
        del self.jobs[job.id]

    def hold(self, job: Job, held: bool, now: float) -> None:
        """A person holds a job that has stopped, or lets it go on. Its hour stands still in between."""
        if held and job.state is State.WAITING:
            accrue(job, now)
            self.waiting.remove(job)
            self.drop_claim(job)
            job.state = State.HELD
            job.stamp += 1
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

    def timer(self, at: float, kind: int, name: str, stamp: int = 0) -> None:
        """Something is to be looked at again at a time."""
        heapq.heappush(self.timers, (at, kind, name, stamp))

    def wait(self, job: Job, now: float) -> None:
        """It waits for devices from now on."""
        job.waits_since = now
        job.key = zero_slack(job, now)
        self.waiting.add(job)
        self._retime(job, now)
        self.remind(job)

    def admit(self, job: Job, pool: Pool, now: float) -> None:
        """Its level is promised from now on, out of the capacity of a pool."""
        self.arrived.discard(_arrival(job))
        counted = list(job.given.items()) if job.state is not State.STOPPING else []
        for node, count in counted:
            _soft(node, job.rank, -count)
        accrue(job, now)
        admit(job, now)
        job.promised_in = pool.key
        job.rank = rank_of(job.ask, admitted=True)
        for node, count in counted:
            _soft(node, job.rank, count)
        self._promise(job, +1)
        if job.state is State.WAITING:
            job.key = zero_slack(job, now)
            self.waiting.add(job)
        if job.state is State.RUNNING:
            self._list_narrow(job, now)
        self._retime(job, now)

    def give(self, job: Job, places: dict[Node, int], now: float, target: dict[Node, int] | None = None) -> None:
        """Gives a job free devices, besides those that it has; `target`: all that it keeps, where that is not all."""
        self.waiting.remove(job)
        for node, count in places.items():
            self._take(node, job, count)
        self.change(job, target, now)

    def change(self, job: Job, target: dict[Node, int] | None, now: float) -> None:
        """Tells a job to go on with what it has, or with `target` only: the rest is free when it says `running`."""
        self._unlist_narrow(job)
        job.pool = next(iter(job.given)).pool
        job.target = target
        self._set_width(job, sum((target or job.given).values()))
        job.state = State.CHANGING
        job.changed = now
        job.changes += 1
        self.rate(job, 0, now)

    def stop(self, job: Job, now: float) -> None:
        """Tells a job to stop; its devices are free when it says `stopped`."""
        self._unlist_narrow(job)
        for node, count in job.given.items():
            _soft(node, job.rank, -count)
        job.state = State.STOPPING
        job.changed = now
        job.changes += 1
        job.target = None
        self._set_width(job, 0)
        self.rate(job, 0, now)
        self.drop_claim(job)

    def stake(self, job: Job, wanted: dict[Node, int], now: float) -> None:
        """Claims devices: those that are free are held for the job, the others when they become free."""
        self.drop_claim(job)
        job.claim, job.claimed_at, job.missing = dict(wanted), now, 0
        for node, count in wanted.items():
            here = min(node.free, count)
            capacity.update(node, free=-here)
            node.held += here
            if here < count:
                node.owed[job] = count - here
                job.missing += count - here
        if job.missing == 0:
            self.whole.add(job)
        self.timer(now + self.settings.hold_s, CLAIM, job.id)

    def drop_claim(self, job: Job) -> None:
        """Devices that were held for a job are free for others."""
        if not job.claim:
            return
        self.whole.discard(job)
        claim, job.claim, job.missing = job.claim, {}, 0
        for node, count in claim.items():
            held = count - node.owed.pop(job, 0)
            node.held -= held
            self._free(node, held)

    def redeem(self, job: Job) -> dict[Node, int]:
        """The devices of a complete claim: free, so that `give` can take them at once."""
        self.whole.discard(job)
        claim, job.claim = job.claim, {}
        for node, count in claim.items():
            node.held -= count
            capacity.update(node, free=count)
        return claim

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

    def _release(self, job: Job, now: float) -> None:
        self._unlist_narrow(job)
        self.rate(job, 0, now)
        for node in sorted(job.given, key=_order):
            self._take(node, job, -job.given[node])
        job.target = None
        self._set_width(job, 0)

    def _set_width(self, job: Job, width: int) -> None:
        if job.admitted is not None:
            self.pools[job.promised_in].short += job.width - width
        job.width = width

    def _take(self, node: Node, job: Job, count: int) -> None:
        """`count` free devices become the job's; negative: that many of the job's become free."""
        has = node.jobs.get(job, 0) + count
        if has:
            node.jobs[job] = job.given[node] = has
        else:
            del node.jobs[job], job.given[node]
        counts = job.state is not State.STOPPING
        low = count if counts and job.rank >= LENT else 0
        mid = count if counts and job.rank == STANDARD else 0
        if count > 0:
            capacity.update(node, -count, low, mid)
        else:
            capacity.update(node, 0, low, mid)
            self._free(node, -count)

    def _free(self, node: Node, count: int) -> None:
        """Devices become free: those that they are owed to come first."""
        if not node.alive or not count:
            return
        for claimant in list(node.owed):
            part = min(node.owed[claimant], count)
            node.held += part
            count -= part
            claimant.missing -= part
            node.owed[claimant] -= part
            if not node.owed[claimant]:
                del node.owed[claimant]
            if claimant.missing == 0:
                self.whole.add(claimant)
            if not count:
                return
        capacity.update(node, free=count)
        node.pool.gain += 1

    def _promise(self, job: Job, sign: int) -> None:
        amount = sign * LEVELS[job.ask.tier] * job.ranks
        pool = self.pools[job.promised_in]
        pool.promised += amount
        pool.short += sign * (job.ranks - job.width)
        tenant: Tenant | None = job.tenant
        while tenant is not None:
            tenant.promised += amount
            tenant = tenant.parent

    def _retime(self, job: Job, now: float) -> None:
        """Its zero-slack time has changed."""
        job.stamp += 1
        at = zero_slack(job, now)
        self.call(job, max(now, at - self.settings.lead_s(job.rank)) if at < 1e300 else inf)

    def call(self, job: Job, at: float) -> None:
        """It must be looked at then, because its slack is nearly used up; infinite: it need not."""
        job.due = at
        if at < 1e300:
            self.timer(at, URGENT, job.id, job.stamp)

    def remind(self, job: Job) -> None:
        """Sets the timers that follow from what it is and when that began."""
        settings = self.settings
        if job.state is State.RUNNING and job.rank > 0:
            self.timer(job.changed + settings.cool_s[job.rank], GAIN, job.id, job.changes)
        if job.state is State.WAITING:
            if job.not_before > job.changed:
                self.timer(job.not_before, GAIN, job.id, job.changes)
            if job.rank == BASIC:
                self.timer(job.waits_since + settings.age_s, GAIN, job.id, job.changes)
        if job.claim:
            self.timer(job.claimed_at + settings.hold_s, CLAIM, job.id)

    def _list_narrow(self, job: Job, now: float) -> None:
        self._unlist_narrow(job)
        if job.width < job.ranks and job.pool is not None:
            job.key = zero_slack(job, now)
            self.enlist_narrow(job)

    def enlist_narrow(self, job: Job) -> None:
        """A running job is below its full width."""
        assert job.pool is not None
        key = self._narrow_key[job.id] = (job.rank, job.key, job.id)
        self.narrow[job.pool.key].add(key)

    def _unlist_narrow(self, job: Job) -> None:
        key = self._narrow_key.pop(job.id, None)
        if key is not None and job.pool is not None:
            self.narrow[job.pool.key].remove(key)


def _soft(node: Node, rank: int, count: int) -> None:
    """Counts devices that jobs of a rank give way with."""
    if rank >= LENT:
        capacity.update(node, low=count)
    elif rank == STANDARD:
        capacity.update(node, mid=count)


def _arrival(job: Job) -> tuple[int, int, float, str]:
    return job.ask.tier, -job.ask.priority, job.ask.submitted, job.id


def _order(node: Node) -> str:
    return node.order
