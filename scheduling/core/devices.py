"""Nodes, who has which of their devices, and what is held or being freed for whom."""

from __future__ import annotations

import heapq

from sortedcontainers import SortedList

from scheduling.core import capacity
from scheduling.core.model import Job, Node, Pool, State
from scheduling.core.settings import LENT, STANDARD, Settings
from scheduling.core.waiting import Waiting

URGENT, GAIN, CLAIM, LEASE = range(4)
"""Kinds of timers: a job's slack is nearly used up; since some time has passed over a job, somebody who failed may
succeed; a claim has been held long; a leased node is about to go."""

NEVER_YET = -1e18


class Devices:
    """Every device is free, a job's, or held for one; a job that waits for others to stop has a claim.

    Attributes:
        narrow: by pool: running jobs below their full width, in the order in which they grow.
        claims: jobs that have a claim, by name; `whole`: those whose claim is complete.
        draining: closed nodes that are to be emptied.
        timers: (time, kind, job or node, stamp), a heap.
        planned_at: when the newest plan was made; what was due until then has been seen to.
        may_admit: somebody's level might be promised now that could not before.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.pools: dict[str, Pool] = {}
        self.nodes: dict[str, Node] = {}
        self.waiting = Waiting(self.settings)
        self.narrow: dict[str, SortedList[tuple[int, float, str]]] = {}
        self.claims: dict[str, Job] = {}
        self.whole: set[Job] = set()
        self.timers: list[tuple[float, int, str, int]] = []
        self.draining: set[str] = set()
        self.planned_at = NEVER_YET
        self.may_admit = True

    # -- nodes ----------------------------------------------------------------------------------------------------

    def add_node(self, name: str, pool_key: str, rack: str, size: int, now: float, until: float | None = None) -> Node:
        """A node is there. `until`: when it is taken away again, for a leased one; infinite if that is not known.

        Raises:
            ValueError: a node of that name is there, or it has no devices.
        """
        if name in self.nodes or size < 1:
            raise ValueError(f"Node {name} with {size} devices is there already, or has none.")
        pool = self.pool(pool_key)
        node = self.nodes[name] = capacity.new_node(pool, name, rack, size, until)
        self.expect_end(node, now)
        self.waiting.hope()
        pool.gain += 1
        self.may_admit = True
        return node

    def pool(self, key: str) -> Pool:
        """A pool by its key; made when first asked for."""
        known = self.pools.get(key)
        if known is None:
            known = self.pools[key] = Pool(key)
            self.narrow[key] = SortedList()
        return known

    def expect_end(self, node: Node, now: float) -> None:
        """Sets the timer of a leased node."""
        if node.until is not None and node.until < 1e300:
            self.timer(max(now, node.until - self.settings.drain_lead_s), LEASE, node.name)

    def close(self, node: Node, closed: bool) -> None:
        """Whether nothing new may be placed on a node. Nobody goes on waiting for devices of a closed one."""
        if node.closed == closed:
            return
        capacity.close(node, closed)
        if closed:
            self.drop_claims_on(node)
        else:
            self.draining.discard(node.name)
            self.expect_end(node, self.planned_at)
        node.pool.gain += 1
        self.may_admit = True

    def drain(self, name: str) -> None:
        """A node is to be emptied; nothing new is placed there."""
        self.close(self.nodes[name], True)
        self.draining.add(name)

    # -- claims ---------------------------------------------------------------------------------------------------

    def stake(self, job: Job, wanted: dict[Node, int], now: float, reserve_s: float = 0.0) -> None:
        """Claims devices: those that are free are held for the job, the others when they become free.

        `reserve_s`: for how long, where nobody is told to make way.
        """
        self.drop_claim(job)
        if job.state is State.WAITING:
            self.waiting.park(job)
        self.claims[job.id] = job
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
        job.claim_until, job.reserves = now + (reserve_s or self.settings.hold_s), reserve_s > 0
        if job.reserves:
            next(iter(wanted)).pool.reserver = job
        self.timer(job.claim_until, CLAIM, job.id)

    def drop_claim(self, job: Job) -> None:
        """Devices that were held for a job are free for others."""
        if not job.claim:
            return
        self.whole.discard(job)
        self._unclaim(job)
        claim, job.claim, job.missing = job.claim, {}, 0
        for node, count in claim.items():
            held = count - node.owed.pop(job, 0)
            node.held -= held
            self._free(node, held)
        if job.state is State.WAITING:
            self.waiting.add(job)

    def redeem(self, job: Job) -> dict[Node, int]:
        """The devices of a complete claim: free, so that `give` can take them at once."""
        self.whole.discard(job)
        self._unclaim(job)
        claim, job.claim = job.claim, {}
        for node, count in claim.items():
            node.held -= count
            capacity.update(node, free=count)
        return claim

    def _unclaim(self, job: Job) -> None:
        del self.claims[job.id]
        pool = next(iter(job.claim)).pool
        if pool.reserver is job:
            pool.reserver = None

    def drop_claims_on(self, node: Node) -> None:
        """Nobody waits for devices of a node any more."""
        for name in sorted(self.claims):
            if node in self.claims[name].claim:
                self.drop_claim(self.claims[name])

    # -- who has what ---------------------------------------------------------------------------------------------

    def timer(self, at: float, kind: int, name: str, stamp: int = 0) -> None:
        """Something is to be looked at again at a time."""
        heapq.heappush(self.timers, (at, kind, name, stamp))

    def take(self, node: Node, job: Job, count: int) -> None:
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
        for claimant in sorted(node.owed, key=_reserves):  # others were told to make way for the other ones
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


def soft(node: Node, rank: int, count: int) -> None:
    """Counts devices that jobs of a rank give way with."""
    if rank >= LENT:
        capacity.update(node, low=count)
    elif rank == STANDARD:
        capacity.update(node, mid=count)


def by_order(node: Node) -> str:
    """Nodes are ordered by it."""
    return node.order


def _reserves(job: Job) -> bool:
    return job.reserves
