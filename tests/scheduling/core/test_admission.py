"""Promises: what they are made of, in which order, and input that makes no sense."""

from __future__ import annotations

import pytest

from scheduling.core.book import Book
from scheduling.core.model import Ask
from scheduling.core.service import lead_s
from scheduling.core.settings import BASIC, LENT, PREMIUM, STANDARD
from tests.scheduling.core.world import World


def admitted(world: World, name: str) -> bool:
    return world.book.jobs[name].admitted is not None


def test_a_large_promise_is_not_kept_out_by_small_ones_for_ever():
    """One-device jobs come and go, and would always take the room that the large one waits for."""
    world = World(1)
    for number in range(7):
        world.submit(f"small-{number}", 1, "premium")
    world.settle()
    world.submit("large", 6, "premium", rigid=True)
    began, number = world.now, 7
    while not admitted(world, "large"):
        assert world.now - began < 10 * 3600
        world.run(300.0, 60.0)
        oldest = min((job for job in world.book.jobs.values() if job.id != "large"), key=lambda job: job.ask.submitted)
        world.finish(oldest.id)
        world.submit(f"small-{number}", 1, "premium")
        number += 1
    assert world.now - began >= world.book.settings.age_s


def test_leased_and_closed_nodes_are_not_promised():
    world = World(1)
    world.node("spot", until=float("inf"))
    world.book.close(world.node("cordoned"), True)
    assert world.book.pools["h100"].capacity == 8
    world.submit("wide", 16, "standard")
    world.settle()
    assert not admitted(world, "wide") and world.book.jobs["wide"].width == 16


def test_a_quota_holds_for_all_below_a_tenant_and_may_be_raised():
    world = World(2)
    world.book.set_quota("org", 4.0)
    world.submit("a", 4, "premium", tenant="org/x")
    world.submit("b", 4, "premium", tenant="org/y")
    world.submit("c", 4, "premium", tenant="other")
    world.settle()
    assert [admitted(world, name) for name in "abc"] == [True, False, True]
    world.book.set_quota("org", 8.0)
    world.settle()
    assert admitted(world, "b")


def test_a_promise_and_its_place_are_in_one_pool():
    world = World()
    for pool in ("a100", "h100"):
        world.node(pool, pool=pool)
    world.submit("first", 8, "premium", pools=("a100", "h100"), rigid=True)
    world.settle()
    world.submit("second", 8, "premium", pools=("a100", "h100"), rigid=True)
    world.settle()
    for name, pool in (("first", "a100"), ("second", "h100")):
        job = world.book.jobs[name]
        assert job.promised_in == pool and [node.name for node in job.given] == [pool]


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": 0},
        {"ranks": -4},
        {"tier": LENT},
        {"tier": 7},
        {"pools": ()},
        {"unit": 3},
        {"unit": 0},
        {"widths": (8, 4)},
        {"widths": (1, 2)},
        {"widths": (0, 4)},
        {"tenant": ""},
    ],
)
def test_an_ask_that_makes_no_sense(wrong):
    right = {"id": "job", "ranks": 4, "tier": PREMIUM, "pools": ("h100",), "submitted": 0.0}
    Ask(**right)
    with pytest.raises(ValueError, match="job"):
        Ask(**{**right, **wrong})


def test_what_is_there_already_is_refused():
    book = Book()
    book.add_node("n", "h100", "r", 8, 0.0)
    book.submit(Ask("job", 1, BASIC, ("h100",), 0.0), 0.0)
    with pytest.raises(ValueError, match="job is there"):
        book.submit(Ask("job", 1, BASIC, ("h100",), 0.0), 1.0)
    with pytest.raises(ValueError, match="there already"):
        book.add_node("n", "h100", "r", 8, 0.0)
    for devices, weight in ((-1.0, 1.0), (float("inf"), 1.0), (1.0, 0.0)):
        with pytest.raises(ValueError, match="no sense"):
            book.set_quota("t", devices, weight)


def test_a_clock_that_goes_back_stands_still():
    world = World(1)
    world.submit("a", 4)
    world.plan()
    planned = world.book.planned_at
    world.now -= 1000.0
    world.plan()
    assert world.book.planned_at == planned


def test_a_standard_job_makes_way_for_one_that_is_to_be_admitted():
    """The sum of the promises has room for all of them; their widths have not: they share the time."""
    world = World(1)
    for number in range(4):
        world.submit(f"small-{number}", 2, "standard", rigid=True)
    world.settle()
    world.run(world.book.settings.cool_s[STANDARD] + 60.0, 30.0)
    world.submit("third", 2, "standard", rigid=True)
    world.settle()
    assert admitted(world, "third") and world.book.jobs["third"].width == 2
    assert sum(job.width == 0 for job in world.book.jobs.values() if job.id.startswith("small")) >= 1


def test_a_promise_that_no_width_can_keep_is_not_given():
    """Beside a premium job of 2 there are 6 devices: the sum of the levels has room for a standard job of 7, no width
    of it that keeps its level has.
    """
    world = World(1)
    world.submit("premium", 2, "premium", rigid=True)
    world.settle()
    world.submit("standard", 7, "standard", rigid=True)
    world.settle()
    assert admitted(world, "premium") and not admitted(world, "standard")
    assert world.book.jobs["standard"].why[4:] == ("beside", "h100", 7, 6)
    world.finish("premium")
    world.run(400.0, 30.0)
    assert admitted(world, "standard")
    world.submit("late", 2, "premium", rigid=True)
    world.settle()
    late = world.book.jobs["late"]
    assert not admitted(world, "late") and "beside" in late.why


def test_what_is_a_large_part_of_its_pool_is_served_sooner():
    world = World(4)
    world.submit("large", 16, "standard")
    world.submit("small", 1, "standard")
    world.settle()
    settings = world.book.settings
    large, small = (lead_s(world.book.jobs[name], settings) for name in ("large", "small"))
    assert settings.lead_s(STANDARD) < small < large <= settings.lead_most * 1080.0
    before = small
    world.node("spot", until=float("inf"))
    assert lead_s(world.book.jobs["small"], settings) > before
