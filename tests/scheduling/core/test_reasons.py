"""Every code of a decision and of a wait becomes a sentence with its figures."""

from __future__ import annotations

import re
from pathlib import Path

from scheduling.core import reasons
from scheduling.core.reasons import decision, standing
from scheduling.core.settings import Settings
from tests.scheduling.core.world import World


def told(world: World, code: str) -> str:
    """The sentence of the newest decision with that code."""
    return decision(next(action for _, action in reversed(world.log) if action.why[0] == code))


def stands(world: World, name: str) -> str:
    return standing(world.book.jobs[name], world.now)


def test_a_start_on_free_devices():
    world = World(1)
    world.submit("gpt", 4, "premium")
    assert stands(world, "gpt") == "It is looked at in the next round."
    world.plan()
    assert told(world, "free") == "Premium job gpt starts: it has 4 devices on node-0; 8 are free."
    assert stands(world, "gpt").startswith("It is being started on 4 devices")
    world.acknowledge("gpt")
    assert stands(world, "gpt") == (
        "It runs on 4 devices. Its level is promised; in this hour it may stand still for 180 s more."
    )


def test_a_narrow_start_and_growth():
    world = World(1)
    world.submit("first", 6, "premium", rigid=True)
    world.settle()
    world.submit("gpt", 8)
    world.settle()
    assert told(world, "narrow") == (
        "Basic job gpt starts narrow, on 2 of its 8 devices, rather than wait for all of them: it has 2 devices on "
        "node-0; 2 are free."
    )
    assert stands(world, "gpt") == "It runs on 2 of its 8 devices."
    world.finish("first")
    world.run(400)
    assert told(world, "idle") == (
        "Basic job gpt grows by 6 devices, and has 8 devices on node-0: 6 are free that nobody who waits can use."
    )


def test_growth_by_a_move():
    world = World(2)
    for name, ranks in (("a", 7), ("b", 8)):
        world.submit(name, ranks, "premium", rigid=True)
    world.settle()
    world.submit("gpt", 8, "basic")
    world.settle()
    world.finish("b")
    world.run(400)
    assert "Basic job gpt moves, to grow: it will have 8 devices on node-1." in told(world, "idle elsewhere")


def test_giving_way_and_what_was_held():
    world = World(1)
    world.submit("small", 8, rigid=True)
    world.submit("wide", 2)
    world.run(90)
    world.submit("gpt", 8, "premium", rigid=True)
    world.plan()
    assert told(world, "gives way") == (
        "Basic job small is preempted: Premium job gpt needs 8 devices, 0 are free. Of the ways through 1 node that "
        "were looked at, this one costs others least: 1980 device-seconds."
    )
    assert stands(world, "small") == "It stops; its 8 devices are others' as soon as it says that it has."
    assert stands(world, "gpt") == (
        "It waits for small to stop or shrink: of 8 devices on node-0 0 are held for it, 8 are still in use."
    )
    world.now += 20
    world.acknowledge("small")
    assert "is placed in 60 s." in stands(world, "small")
    world.plan()
    assert told(world, "held") == (
        "Premium job gpt gets the 8 devices that were held for it, and has 8 devices on node-0: the last of those who "
        "gave way has done so, 20 s after they were told to."
    )


def test_a_level_that_is_about_to_be_missed():
    world = World(2)
    world.submit("std", 8, "standard")
    world.run(60)
    world.submit("a", 8, "basic", rigid=True)
    world.run(60)
    world.submit("prem", 4, "premium")
    world.run(60)
    world.submit("next", 4, "premium")
    world.run(3600)
    codes = {action.why[0] for _, action in world.log}
    assert "gives way" in codes
    assert all(decision(action) for _, action in world.log)


def test_what_is_said_of_an_emptied_node():
    world = World(2)
    world.submit("a", 4, "premium")
    world.submit("b", 8, "basic", rigid=True)
    world.settle()
    home = next(iter(world.book.jobs["a"].given)).name
    world.book.drain(home)
    world.plan()
    text = told(world, "drains")
    assert text == (
        f"Premium job a is preempted, and waits for a place: {home} is being emptied, and elsewhere 0 are free, in no "
        "place that suits it."
    ) or text.startswith("Premium job a shrinks")
    world = World(2)
    world.submit("a", 4, "premium")
    world.settle()
    world.book.drain("node-0")
    world.plan()
    assert told(world, "drains") == (
        "Premium job a moves off node-0, which is being emptied: it will have 4 devices on node-1."
    )


def test_moves_that_make_room():
    world = World(2, settings=Settings(move_gain_s=1e6))
    for name in ("a", "b", "c", "d"):
        world.submit(name, 4, rigid=True)
    world.settle()
    world.now += 3600
    world.plan()
    for name in ("a", "c"):
        world.finish(name)
    world.submit("tree", 8, "premium", rigid=True, unit=8)
    world.plan()
    assert re.fullmatch(
        r"Basic job [bd] moves to 4 devices on node-[01]: Premium job tree needs 8 devices on one node; 8 are free, "
        r"but apart. The moves cost 120 device-seconds, and nobody is preempted for it.",
        told(world, "makes room"),
    )


def test_what_never_fits():
    world = World(2)
    world.submit("huge", 32, rigid=True)
    world.submit("tree", 16, unit=16)
    world.submit("alien", 1, pools=("tpu", "gaudi"))
    world.plan()
    assert stands(world, "huge") == (
        "It never fits: at its narrowest it needs 32 devices, and the largest of h100 has 16 devices, at most 8 on a "
        "node."
    )
    assert "it needs 16 devices, 16 on each node" in stands(world, "tree")
    assert stands(world, "alien") == "There are no nodes of tpu and gaudi."


def test_a_quota_and_a_cap():
    world = World(1)
    world.book.set_quota("org", 4)
    world.submit("a", 4, "premium", tenant="org/x")
    world.submit("b", 4, "standard", tenant="org/y")
    world.settle()
    assert stands(world, "b") == (
        "It runs on 4 devices. Its level is not promised yet, until then it gets what others leave: tenant org may "
        "have 4 devices promised, 3.8 are; this job's level takes 2.8."
    )
    world.submit("c", 6, "standard", rigid=True)
    world.plan()
    assert stands(world, "c") == (
        "It needs 6 devices together of h100; 0 are free, and 4 are used by jobs without a promise, of which none "
        "may be disturbed for it now. Its level is not promised yet, until then it gets what others leave: of "
        "h100 7.2 devices may be promised, 3.8 are; this job's level takes 4.2."
    )


def test_a_hold():
    world = World(1)
    job = world.submit("a", 4)
    world.book.hold(job, True, world.now)
    assert stands(world, "a") == "A person holds it."


def test_every_code_that_is_used_is_known():
    """The codes in the policy's source, against the sentences."""
    folder = Path(reasons.__file__).parent
    source = "".join((folder / f"{name}.py").read_text() for name in ("planner", "draining", "book"))
    used = set(re.findall(r'\(\s*"([a-z ]+)", ', source)) | set(re.findall(r'\("([a-z]+)",\)', source))
    known = set(reasons._DECISIONS) | set(reasons._WAITS)
    assert used - {"place", "resize", "move", "preempt", "no room"} <= known
    assert len(used & known) > 10
