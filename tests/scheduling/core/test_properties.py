"""Whatever happens, in whatever order, with late and missing acknowledgements: what must hold, holds after every step.

`World.plan` checks every plan against the plan of a restored book, and all laws of `world.check`.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduling.core.model import Ask, State
from scheduling.core.placing import fits_empty
from scheduling.core.settings import BASIC, PREMIUM, STANDARD
from tests.scheduling.core.world import World, check, divisors

POOLS = ("a100", "h100")
SIZES = (2, 4, 8)
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24)


class Fleet(RuleBasedStateMachine):
    """Nodes come and go, jobs come and go, time goes by; jobs do what they are told when it suits them."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.names = 0
        self.rng = random.Random(0)

    @initialize(seed=st.integers(0, 2**32), nodes=st.integers(1, 6))
    def begin(self, seed: int, nodes: int) -> None:
        self.rng = random.Random(seed)
        for _ in range(nodes):
            self.add_node(None)
        for tenant, quota in (("org", 40), ("org/a", 8)):
            if self.rng.random() < 0.3:
                self.world.book.set_quota(tenant, quota, self.rng.choice((0.5, 1.0, 3.0)))

    @rule(lease=st.sampled_from((None, None, None, 90.0, 1800.0)))
    def add_node(self, lease: float | None) -> None:
        self.names += 1
        rng, world = self.rng, self.world
        until = None if lease is None else world.now + lease
        pool = rng.choice((*POOLS, "h100"))
        world.node(f"n{self.names}", rng.choice(SIZES), pool=pool, rack=f"r{rng.randrange(3)}", until=until)

    @rule(tier=st.sampled_from((PREMIUM, STANDARD, BASIC)), ranks=st.sampled_from(RANKS), how=st.integers(0, 5))
    def submit(self, tier: int, ranks: int, how: int) -> None:
        self.names += 1
        rng, world = self.rng, self.world
        unit = rng.choice([unit for unit in (1, 1, 1, 2, 4, 8) if ranks % unit == 0])
        widths = (ranks,) if how == 0 else divisors(ranks, unit)
        pools = ("h100",) if how < 4 else rng.choice((POOLS, POOLS[::-1], ("a100",), ("none", "h100")))
        tenant, priority = rng.choice(("org/a", "org/b", "other")), rng.choice((0, 0, 0, 1, -1))
        ask = Ask(f"j{self.names}", ranks, tier, pools, world.now, widths, unit, tenant, priority)
        world.book.submit(ask, world.now)

    @rule()
    def plan(self) -> None:
        self.world.plan()

    @rule(seconds=st.sampled_from((0.5, 15.0, 61.0, 130.0, 310.0, 910.0, 1900.0)))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.plan()

    @rule(hours=st.sampled_from((1, 7, 26)), prompt=st.booleans())
    def wait_long(self, hours: int, prompt: bool) -> None:
        if prompt:
            self.world.run(3600.0, 120.0)
        self.world.now += 3600.0 * (hours - 1)
        self.world.plan()

    @precondition(lambda self: self.world.told)
    @rule(share=st.sampled_from((0.3, 1.0)))
    def acknowledge(self, share: float) -> None:
        """Some of those that were told something have done it; the others are late."""
        self.world.now += 1.0
        for name in list(self.world.told):
            if self.rng.random() < share:
                self.world.acknowledge(name)
        check(self.world.book)

    def any_job(self, *states: State) -> str | None:
        names = sorted(job.id for job in self.world.book.jobs.values() if not states or job.state in states)
        return self.rng.choice(names) if names else None

    @precondition(lambda self: self.world.book.jobs)
    @rule()
    def finish(self) -> None:
        name = self.any_job()
        assert name is not None
        self.world.finish(name)
        check(self.world.book)

    @rule()
    def crash(self) -> None:
        """A job's processes are gone by themselves, and it is told again what it was told."""
        name = self.any_job(State.RUNNING, State.CHANGING, State.STOPPING)
        if name is not None:
            self.world.told.pop(name, None)
            job = self.world.book.jobs[name]
            self.world.book.stopped(job, self.world.now)
            self.world.book.lost_work(job, 100.0, self.world.now)
            self.world.book.stopped(job, self.world.now)

    @rule()
    def hold(self) -> None:
        name = self.any_job()
        if name is not None:
            job, world = self.world.book.jobs[name], self.world
            if job.state in (State.RUNNING, State.CHANGING):
                world.book.stop(job, world.now)
                world.told[name] = "stopped"
            world.book.hold(job, True, world.now)
            check(world.book)

    @rule()
    def let_go(self) -> None:
        name = self.any_job(State.HELD)
        if name is not None:
            self.world.book.hold(self.world.book.jobs[name], False, self.world.now)
            check(self.world.book)

    @precondition(lambda self: self.world.book.nodes)
    @rule(what=st.sampled_from(("lose", "drain", "cordon", "open", "open")))
    def node(self, what: str) -> None:
        name = self.rng.choice(sorted(self.world.book.nodes))
        book = self.world.book
        if what == "lose":
            self.world.lose(name)
        elif what == "drain":
            book.drain(name)
        else:
            book.close(book.nodes[name], what == "cordon")
        check(book)

    @rule()
    def quota(self) -> None:
        quota = self.rng.choice((None, 4.0, 10.5, 60.0))
        self.world.book.set_quota(self.rng.choice(("org", "org/b")), quota)

    def teardown(self) -> None:
        """Nothing more arrives and nobody interferes: every job that fits the fleet comes to run, and ends."""
        world, book = self.world, self.world.book
        for name in sorted(book.nodes):
            if book.nodes[name].until is not None:
                world.lose(name)
            else:
                book.close(book.nodes[name], False)
        for job in list(book.jobs.values()):
            book.hold(job, False, world.now)
        left = {name for name, job in book.jobs.items() if any(fits_empty(*fit) for fit in _fits(world, job))}
        for _ in range(600):
            world.run(120.0, 60.0)
            for name in [name for name in left if name in book.jobs and book.jobs[name].served >= 600 * len(RANKS)]:
                world.finish(name)
            for name in left & set(book.jobs):
                job = book.jobs[name]
                if job.state is State.RUNNING and world.now - job.changed >= 600:
                    world.finish(name)
            left &= set(book.jobs)
            if not left:
                return
        raise AssertionError(
            f"never ran: {[book.jobs[name] for name in sorted(left)]} {[book.jobs[n].why for n in left]}"
        )


def _fits(world: World, job):
    pools = [job.pool] if job.pool else [world.book.pools[key] for key in job.ask.pools if key in world.book.pools]
    return [(pool, job.widths[0], job.unit) for pool in pools]


_HEALTH = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

TestFleet = Fleet.TestCase
TestFleet.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=_HEALTH, derandomize=True
)


class LongFleet(Fleet):
    """The same for longer."""


TestLongFleet = pytest.mark.slow(pytest.mark.timeout(3600)(LongFleet.TestCase))
TestLongFleet.settings = settings(
    max_examples=400, stateful_step_count=80, deadline=None, suppress_health_check=_HEALTH
)
