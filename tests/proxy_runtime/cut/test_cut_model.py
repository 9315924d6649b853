"""The cut as a model: random programs, interleavings, delays, stops, failures and placements on the real engine.

Never a deadlock, never a collective done by some and not by others, and the bits of a direct computation always.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.native.build import fabric_module
from tests.proxy_runtime.cut.program import evaluate, random_program
from tests.proxy_runtime.cut.world import Checkpoint, Stuck, World

LIVE, MOVE, CALL_OFF, DIE = "live", "move", "call off", "die"


def random_placement(source: random.Random, ranks: int) -> list[int]:
    """Rank -> proxy, on 1 to 8 proxies, none of them empty."""
    proxies = source.randint(1, min(8, ranks))
    placement = [*range(proxies), *(source.randrange(proxies) for _ in range(ranks - proxies))]
    source.shuffle(placement)
    return placement


def run_until(world: World, actions: int) -> bool:
    """Acts so many times; true if the program has ended."""
    for _ in range(actions):
        if not world.act():
            if world.done():
                return True
            raise Stuck(f"ranks at {[state.position for state in world.ranks]}")
    return False


def cut(world: World, source: random.Random, interrupt_after: int | None) -> dict[str, int] | None:
    """Stop, agree, finish, in any interleaving with deliveries. None if interrupted before everybody was finished."""
    goal: dict[str, int] | None = None
    told: set[int] = set()
    actions = 0
    while True:
        if interrupt_after is not None and actions >= interrupt_after:
            return None
        actions += 1
        if goal is None and len(world.stopped) == world.proxies:
            goal = world.agree()
        waiting = [p for p in range(world.proxies) if p not in (world.stopped if goal is None else told)]
        if waiting and source.random() < 0.2:
            proxy = source.choice(waiting)
            if goal is None:
                world.stopped.add(proxy)
            else:
                world.engines[proxy].set_targets(goal)
                told.add(proxy)
                world.dirty.add(proxy)
            continue
        if goal is not None and not waiting and all(engine.finished() for engine in world.engines):
            world.check_cut(goal)
            return goal
        if not world.act() and not waiting:
            raise Stuck(f"finish never ends: {world.reports()}, targets {goal}")


def play(seed: int, ranks: int, length: int, cuts: list[str]) -> None:
    source = random.Random(seed)
    native = fabric_module()
    program = random_program(source, ranks, length)
    truth = evaluate(program)
    committed = Checkpoint.start(program)

    def begin() -> World:
        return World(native, program, truth, random_placement(source, ranks), committed, source)

    world = begin()
    for outcome in cuts:
        run_until(world, source.randint(0, 30 * length))
        interrupt_after = source.randint(0, 60) if outcome in (CALL_OFF, DIE) else None
        finished = cut(world, source, interrupt_after)
        if outcome == DIE and finished is None:
            world.kill(source.randrange(world.proxies))
            for _ in range(source.randint(0, 20)):  # the others go on for a while
                world.act()
            world = begin()
        elif outcome == MOVE:
            committed = world.dump()
            world = begin()
        else:
            if finished is not None and source.random() < 0.5:
                committed = world.dump()
            world.resume()
    while not run_until(world, 1000):
        pass
    assert [state.state for state in world.ranks] == truth.states


CASES: dict[str, Any] = {
    "seed": st.integers(0, 2**32 - 1),
    "ranks": st.integers(2, 8),
    "length": st.integers(1, 30),
    "cuts": st.lists(st.sampled_from([LIVE, MOVE, CALL_OFF, DIE]), max_size=5),
}
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]


@given(**CASES)
@settings(max_examples=60, deadline=None, suppress_health_check=CHECKS)
def test_any_cut_of_any_program(seed: int, ranks: int, length: int, cuts: list[str]) -> None:
    play(seed, ranks, length, cuts)


@pytest.mark.slow
@given(**CASES)
@settings(max_examples=1500, deadline=None, suppress_health_check=CHECKS)
def test_any_cut_of_any_program_at_length(seed: int, ranks: int, length: int, cuts: list[str]) -> None:
    play(seed, ranks, length, cuts)


@given(seed=CASES["seed"], ranks=CASES["ranks"])
@settings(max_examples=15, deadline=None, suppress_health_check=CHECKS)
def test_bits_do_not_depend_on_the_placement(seed: int, ranks: int) -> None:
    native = fabric_module()
    program = random_program(random.Random(seed), ranks, 15)
    truth = evaluate(program)
    for proxies in range(1, ranks + 1):
        source = random.Random(seed + proxies)
        placement = [rank * proxies // ranks for rank in range(ranks)]
        world = World(native, program, truth, placement, Checkpoint.start(program), source)
        while not run_until(world, 1000):
            pass
        assert [state.state for state in world.ranks] == truth.states


def test_the_model_notices_a_wrong_target() -> None:
    """Control: a target one too high is refused or never reached; a wrong result is noticed."""
    source = random.Random(5)
    native = fabric_module()
    program = random_program(source, 3, 20)
    truth = evaluate(program)
    world = World(native, program, truth, [0, 1, 2], Checkpoint.start(program), source)
    run_until(world, 40)
    world.stopped.update(range(3))
    goal = {name: n + 1 for name, n in world.agree().items()}
    with pytest.raises((Stuck, native.CollectiveError)):
        for engine in world.engines:
            engine.set_targets(goal)
        while not all(engine.finished() for engine in world.engines):
            if not world.act():
                raise Stuck("never finished")
    for known in truth.results.values():
        known.append(b"wrong")
    world = World(native, program, truth, [0, 1, 2], Checkpoint.start(program), source)
    with pytest.raises(AssertionError, match="other bits"):
        run_until(world, 100_000)
