"""Defragmentation: jobs move together for a gang that must stay on one node, where that is worth it."""

from __future__ import annotations

from scheduling.core.model import State
from scheduling.core.settings import Settings
from tests.scheduling.core.world import World


def scattered(sizes: list[int], ended: list[int], **tuned) -> World:
    """Nodes of eight on which small jobs have run for an hour; those that `ended` have left holes."""
    world = World(3, settings=Settings(**tuned))
    for index, size in enumerate(sizes):
        world.submit(f"small-{index}", size, "standard", rigid=True)
    world.settle()
    world.now += 3600
    world.plan()
    for index in ended:
        world.finish(f"small-{index}")
    return world


def test_the_fewest_devices_move():
    world = scattered([6, 2, 6, 2, 6, 2], [0, 2, 4])
    world.submit("tree", 8, "premium", unit=8)
    moves = world.plan()
    assert [(action.kind, sum(action.places.values())) for action in moves] == [("move", 2)]
    assert moves[0].beneficiary is world.book.jobs["tree"]
    world.settle()
    tree = world.book.jobs["tree"]
    assert tree.state is State.RUNNING and len(tree.given) == 1
    assert all(job.state is State.RUNNING for job in world.book.jobs.values())


def test_nobody_moves_for_one_that_can_be_spread():
    world = scattered([6, 2, 6, 2, 6, 2], [0, 2, 4])
    world.submit("free", 8, "premium")
    assert [action.kind for action in world.plan()] == ["place"]


def test_nobody_moves_where_it_costs_more_than_it_gives():
    world = scattered([4, 4, 4, 4, 4, 4], [0, 2], move_gain_s=10.0)
    world.submit("tree", 8, "basic", unit=8)
    world.now += 400  # turns come every 300 s
    assert world.plan() == []
    world = scattered([4, 4, 4, 4, 4, 4], [0, 2])
    world.submit("tree", 8, "basic", unit=8)
    world.now += 400  # turns come every 300 s
    assert [action.kind for action in world.plan()] == ["move"]


def test_one_that_has_just_moved_is_left_alone():
    world = scattered([4, 4, 4, 4, 4, 4], [0, 2])
    for job in world.book.jobs.values():
        job.changed = world.now - 600.0
    world.submit("tree", 8, "basic", unit=8)
    world.now += 400  # turns come every 300 s
    assert world.plan() == []
