"""A book, a planner and a clock; jobs that do what they are told when the test says so; and what must always hold."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import fields

from scheduling.core.actions import Action, Plan
from scheduling.core.book import Book
from scheduling.core.model import Ask, Job, Node, Pool, State, promise_of
from scheduling.core.planner import Planner
from scheduling.core.record import BookRecord, JobRecord, record, restore
from scheduling.core.settings import BASIC, LENT, PREMIUM, STANDARD, Settings

POOL = "h100"
TIERS = {"premium": PREMIUM, "standard": STANDARD, "basic": BASIC}


def divisors(ranks: int, unit: int = 1) -> tuple[int, ...]:
    """The widths of a job that can be resized freely."""
    groups = ranks // unit
    return tuple(unit * width for width in range(1, groups + 1) if groups % width == 0)


def differences(one: BookRecord, other: BookRecord) -> list[tuple[object, object]]:
    """What differs between two records, field by field."""
    found: list[tuple[object, object]] = []
    for ours, theirs in zip(_flat(one), _flat(other), strict=True):
        if ours != theirs:
            found.append((ours, theirs))
    return found


def _flat(record: BookRecord) -> list[object]:
    flat: list[object] = []
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name in ("nodes", "jobs", "tenants"):
            for item in value:
                key = item.ask.id if isinstance(item, JobRecord) else item.name
                flat += [(key, part.name, getattr(item, part.name)) for part in fields(item)]
        else:
            flat.append((field.name, value))
    return flat


def dump(plan: Plan) -> str:
    """A plan as text, with all that is in it."""
    lines = [
        f"{action.kind} {action.job.id} {[(node.name, count) for node, count in action.places.items()]} {action.why} "
        f"{action.beneficiary.id if action.beneficiary else ''}"
        for action in plan.actions
    ]
    return "\n".join([*lines, repr(plan.wake)])


class World:
    """A fleet of one pool, unless nodes are added by hand; `told` has the newest order that a job has yet to follow."""

    def __init__(self, nodes: int = 0, size: int = 8, *, racks: int = 4, settings: Settings | None = None) -> None:
        self.book = Book(settings)
        self.planner = Planner(self.book)
        self.now = 1_700_000_000.0  # as live: a Unix time
        self.told: dict[str, str] = {}
        self.log: list[tuple[float, Action]] = []
        self.preempted: dict[str, deque[float]] = {}
        self.promised: dict[str, tuple[int, dict[Node, int], float]] = {}
        for index in range(nodes):
            self.node(f"node-{index}", size, rack=f"rack-{index // racks}")

    def node(
        self, name: str, size: int = 8, *, pool: str = POOL, rack: str = "rack", until: float | None = None
    ) -> Node:
        """A node is there."""
        return self.book.add_node(name, pool, rack, size, self.now, until)

    def submit(self, name: str, ranks: int, tier: str = "basic", *, rigid: bool = False, **more) -> Job:
        """A job arrives."""
        unit = more.get("unit", 1)
        widths = (ranks,) if rigid else divisors(ranks, unit)
        more = {"pools": (POOL,), "widths": widths, **more}
        return self.book.submit(Ask(name, ranks, TIERS[tier], submitted=self.now, **more), self.now)

    def plan(self) -> list[Action]:
        """One round of the planner, checked: the same from a restored book, and every law holds after it."""
        before = record(self.book)
        twin = restore(before)
        assert not differences(record(twin), before)
        plan = self.planner.plan(self.now)
        assert dump(Planner(twin).plan(self.now)) == dump(plan)
        assert not differences(record(twin), record(self.book))
        for action in plan.actions:
            self.told[action.job.id] = "stopped" if action.kind == "preempt" else "running"
            self.log.append((self.now, action))
        check(self.book)
        check_plan(self.book, plan)
        for job in self.book.jobs.values():
            if job.state is State.WAITING and not job.why:
                head = self.book.waiting.head_of(job)
                assert head is not None and head.why, f"{job} waits without a reason"
        self._check_turns(plan)
        self._check_promises(plan)
        return list(plan.actions)

    def acknowledge(self, name: str) -> None:
        """A job has done what it was told last."""
        job = self.book.jobs[name]
        if self.told.pop(name) == "running":
            self.book.running(job, self.now)
        else:
            self.book.stopped(job, self.now)

    def settle(self, rounds: int = 50) -> list[Action]:
        """Plans, and jobs do what they are told at once, until nothing more happens."""
        done: list[Action] = []
        for _ in range(rounds):
            actions = self.plan()
            done += actions
            if not actions and not self.told:
                return done
            for name in list(self.told):
                self.acknowledge(name)
        raise AssertionError(f"it does not come to rest: {done[-5:]}")

    def run(self, seconds: float, step: float = 30.0) -> list[Action]:
        """Time goes by in steps, jobs do what they are told one step later."""
        done: list[Action] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            for name in list(self.told):
                self.acknowledge(name)
            done += self.plan()
        return done

    def lose(self, name: str) -> None:
        """A node is gone; its jobs have yet to be stopped elsewhere."""
        for job in self.book.remove_node(name, self.now):
            self.told[job.id] = "stopped"

    def finish(self, name: str) -> None:
        """A job ends."""
        self.told.pop(name, None)
        self.book.finish(self.book.jobs[name], self.now)

    def _check_turns(self, plan: Plan) -> None:
        """No job is preempted again and again: at most once in every minute that it cools down in, whoever profits."""
        settings = self.book.settings
        for action in plan.actions:
            if action.kind != "preempt" or action.beneficiary is None:
                continue
            times = self.preempted.setdefault(action.job.id, deque(maxlen=60))
            if action.job.rank >= LENT and times:
                assert self.now - times[-1] >= settings.again_s
            assert len(times) < 60 or self.now - times[0] >= 3600.0
            times.append(self.now)

    def _check_promises(self, plan: Plan) -> None:
        """Those for whom others gave way get what was freed: their claims do not go away by themselves, and the whole
        of a claim is what they are given.
        """
        book = self.book
        given = {action.job.id: action for action in plan.actions if action.kind in ("place", "resize", "move")}
        for name, (changes, places, until) in list(self.promised.items()):
            job = book.jobs.get(name)
            if job is not None and job.claim and job.changes == changes:
                continue
            del self.promised[name]
            lapsed = any(book.nodes.get(node.name) is not node or node.closed for node in places) or self.now >= until
            if job is not None and not lapsed:
                assert job.changes != changes, f"the claim of {job} went away by itself"
            action = given.get(name)
            if action is not None and action.why[0] == "held":
                assert all(action.places.get(node, 0) >= count for node, count in places.items())
        for action in plan.actions:
            if action.beneficiary is not None:
                job = action.beneficiary
                self.promised[job.id] = job.changes, dict(job.claim), job.claim_until


def check_plan(book: Book, plan: Plan) -> None:
    """Nobody gives way for nothing, and nobody is told two things at once that contradict each other."""
    for action in plan.actions:
        if action.beneficiary is not None:
            claimant = action.beneficiary
            assert claimant.claim, f"{action.job} gives way to {claimant}, who has no claim"
            assert sum(claimant.claim.values()) + claimant.width in claimant.widths
            long_waited = claimant.rank == BASIC and action.job.rank in (STANDARD, LENT)
            assert claimant.rank <= action.job.rank or long_waited or action.why[0] == "makes room"
        if action.kind in ("place", "move"):
            assert action.places and not any(node.closed for node in action.places if action.kind == "place")
    counts = Counter(action.job.id for action in plan.actions)
    assert all(count == 1 for count in counts.values()), counts.most_common(2)


def check(book: Book) -> None:
    """What must hold in every state: every device has one owner, gangs are whole, and all sums and indexes agree."""
    for node in book.nodes.values():
        assert node.free >= 0 and node.held >= 0
        assert sum(node.jobs.values()) + node.held + node.free == node.size, node.name
        held = sum(job.claim.get(node, 0) - node.owed.get(job, 0) for job in book.claims.values())
        assert held == node.held, node.name
        freeing = sum(count - (job.target or {}).get(node, 0) for job, count in node.jobs.items() if _frees(job))
        owed = sum(count for job, count in node.owed.items() if not job.reserves)
        assert owed <= freeing, f"{node.name} owes more than is being freed"
        assert all(book.jobs[job.id] is job and job.given[node] == count for job, count in node.jobs.items())
    for job in book.jobs.values():
        _check_job(book, job)
    for pool in book.pools.values():
        _check_pool(book, pool)
    for tenant in book.tenants.values():
        below = [job for job in book.jobs.values() if f"{job.tenant.name}/".startswith(f"{tenant.name}/")]
        assert tenant.rate == sum(job.rate for job in below)
        assert tenant.hundredths == sum(promise_of(job.ask) for job in below if job.admitted is not None)
    assert book.waiting.count == sum(job.state is State.WAITING for job in book.jobs.values())
    assert {job.id for job in book.whole} == {name for name, job in book.claims.items() if not job.missing}


def _frees(job: Job) -> bool:
    return job.state is State.STOPPING or job.target is not None


def _check_job(book: Book, job: Job) -> None:
    assert all(node.name in book.nodes and node.jobs[job] == count for node, count in job.given.items())
    assert len({node.pool.key for node in job.given}) <= 1
    has = sum(job.given.values())
    if job.state in (State.RUNNING, State.CHANGING):
        kept = job.given if job.target is None else job.target
        assert sum(kept.values()) == job.width and job.width in job.widths, f"{job} is partial"
        assert all(count % job.unit == 0 for count in kept.values())
        assert all(job.given.get(node, 0) >= count for node, count in kept.items())
        assert job.pool is next(iter(job.given)).pool
    elif job.state is not State.STOPPING:
        assert not has and not job.width
    assert job.rate == (job.width if job.state is State.RUNNING else 0)
    assert (job.id in book.claims) == bool(job.claim)
    if job.claim:
        assert job.state in (State.WAITING, State.RUNNING)
        assert all(count % job.unit == 0 for count in job.claim.values())
        assert job.missing == sum(node.owed.get(job, 0) for node in job.claim)


def _check_pool(book: Book, pool: Pool) -> None:
    nodes = [node for node in pool.nodes.values() if not node.closed]
    assert pool.devices == sum(node.size for node in pool.nodes.values())
    assert pool.size == max((node.size for node in pool.nodes.values()), default=0)
    assert pool.capacity == sum(node.size for node in nodes if node.until is None)
    assert pool.free == sum(node.free for node in nodes)
    assert pool.low == sum(node.low for node in nodes) and pool.mid == sum(node.mid for node in nodes)
    for index, bucket in (
        (pool.by_free, lambda node: node.free),
        (pool.by_low, lambda node: node.free + node.low),
        (pool.by_mid, lambda node: node.free + node.low + node.mid),
    ):
        listed = sorted((place, item[1]) for place, items in enumerate(index.buckets) for item in items)
        assert listed == sorted((bucket(node), node.order) for node in nodes)
    admitted = [job for job in book.jobs.values() if job.admitted is not None and job.promised_in == pool.key]
    assert pool.hundredths == sum(promise_of(job.ask) for job in admitted)
    assert pool.short == sum(job.ranks - job.width for job in admitted if job.state is not State.HELD)
    for rack in pool.racks.values():
        assert rack.empty == sum(node.free == node.size for node in rack.nodes.values() if not node.closed)
