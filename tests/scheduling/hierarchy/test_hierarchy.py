"""Regions and the fleet: jobs move to where they run, once each, whatever is lost on the way or twice."""

from __future__ import annotations

import random
from dataclasses import replace

import orjson

from scheduling.core.model import Ask, State
from scheduling.core.settings import BASIC
from scheduling.hierarchy.member import Answer, Desk, Order, Passport
from scheduling.hierarchy.movement import FLEET, LevelState, MovementSettings, Phase, choose, decide
from scheduling.hierarchy.routing import Routes, route
from scheduling.hierarchy.summary import Summary, merge, summarise
from tests.scheduling.core.world import World

SETTINGS = MovementSettings()


class Region:
    """Clusters under one level; what it says and hears may be lost, or come twice."""

    def __init__(self, clusters: dict[str, int], loss: float = 0.0, settings: MovementSettings = SETTINGS) -> None:
        self.worlds = {name: World(nodes) for name, nodes in clusters.items()}
        self.desks = {name: Desk(world.book) for name, world in self.worlds.items()}
        self.state, self.answers, self.settings = LevelState(), list[Answer](), settings
        self.rng, self.loss = random.Random(5), loss
        self.lost = False
        self.duration: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.orders: list[Order] = []
        self.now = next(iter(self.worlds.values())).now

    def submit(self, cluster: str, name: str, ranks: int, tier: str = "basic", seconds: float = 3600.0, **more) -> None:
        self.worlds[cluster].submit(name, ranks, tier, **more)
        self.duration[name] = seconds

    def summaries(self) -> list[Summary]:
        return [summarise(world.book, name, self.now) for name, world in self.worlds.items()]

    def copies(self, message):
        """Lost, once, or twice."""
        lucky = self.rng.random() >= self.loss
        return [message] * (lucky + (self.rng.random() < self.loss))

    def run(self, seconds: float, step: float = 30.0) -> None:
        end = self.now + seconds
        while self.now < end and len(self.ended) < len(self.duration):
            self.now += step
            for name, world in self.worlds.items():
                world.run(step, step)
                self.desks[name].let_go(self.now)
                for job in list(world.book.jobs.values()):
                    served = job.served + job.rate * (self.now - job.at)
                    if job.state is State.RUNNING and served >= self.duration[job.id] * job.ranks:
                        assert job.id not in self.ended, "it ran twice"
                        self.ended[job.id] = self.now
                        world.finish(job.id)
            if not self.lost:
                self.level()
            self.check()

    def level(self) -> None:
        answers, self.answers = self.answers, []
        self.state, orders = decide(self.state, self.summaries(), answers, self.now, self.settings)
        self.orders += orders
        for order in [copy for one in orders for copy in self.copies(one)]:
            cluster = order.member.rpartition("/")[2]
            leaving = set(self.desks[cluster].leaving)
            self.answers += self.copies(self.desks[cluster].answer(order, self.now))
            for name in set(self.desks[cluster].leaving) - leaving:
                self.worlds[cluster].told[name] = "stopped"

    def check(self) -> None:
        """Every job is in one place: a cluster, or on its way."""
        for name in self.duration:
            homes = [cluster for cluster, world in self.worlds.items() if name in world.book.jobs]
            assert len(homes) + (name in self.ended) <= 1, f"{name} is doubled: {homes}"
            if not homes and name not in self.ended:
                assert self.state.moves[name].phase in (Phase.LEAVING, Phase.ARRIVING), f"{name} is lost"


def overloaded(loss: float = 0.0) -> Region:
    """Three clusters; all jobs come to the first."""
    region = Region({"a": 2, "b": 2, "c": 3}, loss)
    rng = random.Random(2)
    for number in range(16):
        tier = rng.choice(("premium", "standard", "basic", "basic"))
        region.submit("a", f"job-{number}", rng.choice((1, 2, 4, 8, 8, 16)), tier, rng.choice((1800.0, 7200.0)))
    return region


def test_jobs_move_from_an_overloaded_cluster_and_none_is_doubled():
    alone, helped = overloaded(), overloaded()
    alone.lost = True
    alone.run(60 * 3600.0, 90.0)
    helped.run(60 * 3600.0)
    assert len(alone.ended) == len(helped.ended) == 16
    elsewhere = {order.ask.id for order in helped.orders if order.kind == "adopt"}
    assert len(elsewhere) > 5
    assert max(helped.ended.values()) < max(alone.ended.values())
    assert sum(helped.ended.values()) < sum(alone.ended.values())
    assert helped.state.moves == {}


def test_messages_that_are_lost_or_come_twice_double_and_lose_nothing():
    region = overloaded(loss=0.3)
    region.run(80 * 3600.0)
    assert len(region.ended) == 16
    assert any(order.kind == "adopt" for order in region.orders)


def test_a_lost_level_leaves_the_clusters_working():
    """The region dies in the middle of its moves and comes back hours later, from its state."""
    region = overloaded(loss=0.2)
    while not any(move.phase is Phase.ARRIVING for move in region.state.moves.values()):
        region.run(30.0)
    region.lost = True
    before = len(region.ended)
    region.run(4 * 3600.0)
    assert len(region.ended) > before
    region.lost = False
    region.run(60 * 3600.0)
    assert len(region.ended) == 16 and region.state.moves == {}


def test_one_member_is_asked_at_a_time():
    region = overloaded()
    region.run(900.0)
    asked = [order for order in region.orders if order.kind == "bid"]
    assert asked
    by_round: dict[tuple[str, int], set[str]] = {}
    for order in asked:
        by_round.setdefault((order.ask.id, order.number), set()).add(order.member)
    assert all(len(members) == 1 for members in by_round.values())
    assert all(order.member != "a" for order in asked)


def test_a_running_job_moves_to_where_it_has_its_full_width():
    region = Region({"a": 1, "b": 1})
    region.submit("a", "prem", 6, "premium", 1e6)
    region.run(60.0)
    region.submit("a", "narrow", 8, "basic", 5 * 3600.0)
    region.run(3 * 3600.0)
    job = region.worlds["b"].book.jobs["narrow"]
    assert job.state is State.RUNNING and job.width == 8
    assert job.served > 2 * 1800


def test_what_is_stale_moves_nobody():
    region = overloaded()
    region.run(660.0)
    region.now += 600
    old = [replace(one, at=one.at - 1000.0) for one in region.summaries()]
    assert decide(LevelState(), old, [], region.now, SETTINGS)[1] == ()


def test_a_job_that_was_stopped_for_a_level_that_fell_silent_goes_on():
    region = Region({"a": 1})
    region.submit("a", "job", 8)
    region.run(90.0)
    desk, world = region.desks["a"], region.worlds["a"]
    answer = desk.answer(Order("release", "a", 1, world.book.jobs["job"].ask), world.now)
    assert answer == Answer(1, True, None)
    world.told["job"] = "stopped"
    world.run(60.0)
    assert world.book.jobs["job"].state is State.HELD
    desk.let_go(world.now + 600)
    world.run(900.0)
    assert world.book.jobs["job"].state is State.RUNNING


def test_a_job_with_a_promise_stays_where_it_was_given():
    region = Region({"a": 1, "b": 1})
    region.submit("a", "prem", 4, "premium")
    region.run(60.0)
    ask = region.worlds["a"].book.jobs["prem"].ask
    assert region.desks["a"].answer(Order("release", "a", 1, ask), region.now) == Answer(1, False, None)
    assert region.summaries()[0].candidates == ()


def test_the_fleet_sees_regions_as_a_region_sees_clusters():
    """Two regions; the first one's clusters are full, and the fleet moves a job by the path to its cluster."""
    east, west = Region({"a": 1, "b": 1}), Region({"c": 2})
    for number, cluster in enumerate(("a", "b", "a", "b")):
        east.submit(cluster, f"job-{number}", 8, rigid=True)
    west.submit("c", "small", 1, seconds=1e6)
    for region in (east, west):
        region.run(2000.0)
    members = [merge("east", east.summaries(), east.now), merge("west", west.summaries(), west.now)]
    state, orders = decide(LevelState(), members, [], east.now, FLEET)
    assert {(order.kind, order.member) for order in orders} == {("bid", "west")}
    assert choose(orders[0].ask, west.summaries()) == "c"
    answers = [west.desks["c"].answer(order, west.now) for order in orders]
    state, orders = decide(state, members, answers, east.now, FLEET)
    assert {order.member for order in orders} <= {"east/a", "east/b"} and orders[0].kind == "release"
    answers = [east.desks[order.member[-1]].answer(order, east.now) for order in orders]
    state, orders = decide(state, members, answers, east.now, FLEET)
    assert [order.kind for order in orders] == ["adopt"] * len(answers)
    answers = [west.desks["c"].answer(order, west.now) for order in orders]
    state, _ = decide(state, members, answers, east.now, FLEET)
    moved = {order.ask.id for order in orders}
    assert moved and not moved & set(state.moves) and moved <= set(west.worlds["c"].book.jobs)


def test_a_region_passes_an_order_on_to_one_cluster_and_to_the_same_again():
    region = Region({"small": 1, "large": 3})
    region.submit("large", "here", 20, "basic", rigid=True)
    region.run(60.0)
    members = region.summaries()
    asks = {ranks: Ask(f"job-{ranks}", ranks, BASIC, ("h100",), 0.0) for ranks in (2, 8, 24)}
    passport = Passport(asks[8], 0.0, 0.0)
    routes, found = route(Routes(), Order("bid", "west", 1, asks[8]), members)
    assert found == "small"  # the tightest that has room
    elsewhere = [replace(member, pools=()) for member in members if member.name == "small"]
    again, found = route(routes, Order("adopt", "west", 2, asks[8], passport), elsewhere)
    assert found == "small" and again == routes  # whatever has happened since it was asked
    routes, found = route(routes, Order("bid", "west", 3, asks[24]), members)
    assert found is None and route(routes, Order("bid", "west", 4, asks[2]), members)[1] == "large"
    assert route(routes, Order("release", "east/b", 5, asks[2]), members)[1] == "b"
    # A job that no bid was made for has to be somewhere all the same, and comes to the same cluster again.
    routes, found = route(routes, Order("adopt", "west", 6, asks[24]), members)
    assert found == "large" and route(routes, Order("adopt", "west", 6, asks[24]), [])[1] == "large"


def test_two_levels_may_use_the_same_numbers():
    region = Region({"a": 1})
    region.submit("a", "job", 4)
    desk, ask = region.desks["a"], region.worlds["a"].book.jobs["job"].ask
    stranger = Ask("stranger", 4, BASIC, ("h100",), 0.0)
    assert desk.answer(Order("adopt", "a", 1, stranger, Passport(stranger, 0.0, 0.0), "fleet"), region.now).yes
    given = desk.answer(Order("release", "a", 1, ask, level="region"), region.now)
    assert given.passport is not None and given.passport.ask.id == "job"
    assert desk.answer(Order("release", "a", 1, ask, level="region"), region.now) == given


def test_a_summary_is_small():
    region = Region({"a": 40})
    for number in range(400):
        region.submit("a", f"job-{number:012}", 16, rigid=True)
    region.run(60.0)
    assert len(orjson.dumps(region.summaries()[0])) < 6000
