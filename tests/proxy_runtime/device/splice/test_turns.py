"""Which rank of a device goes on, what those that wait keep meanwhile, and what is measured of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.proxy_runtime.device.splice.programs import COMM, Rank, add_, mul_, sin, together
from tests.proxy_runtime.device.splice.test_sharing import N, counters

LARGE = 1 << 14  # floats


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_rank_whose_host_is_late_is_waited_for(job: Callable[..., Any]) -> None:
    """Its activations are there: another rank's beside them would double the peak."""
    running = job([0, 0])

    def program(rank: Rank, index: int) -> None:
        rank.producer.write_floats(1, [1.0 + index] * LARGE)
        rank.producer.write_floats(2, [1.0] * N)
        for _ in range(3):
            activation = rank.run(sin(1, LARGE), results=1)
            time.sleep(0.02)
            rank.run(sin(activation, LARGE), results=1)
            rank.producer.free(activation)
            rank.producer.free(rank.next_handle - 1)
            rank.all_reduce(2, N)
            rank.run(mul_(2, 1, N))
            rank.producer.sync()

    together(running.ranks, program)
    # Two inputs, the two results of one rank, and little.
    assert 4 * 4 * LARGE <= counters(running)["peak_bytes"] <= 5 * 4 * LARGE


def test_what_a_waiting_rank_gives_up_further_on_is_given_up_at_once(job: Callable[..., Any]) -> None:
    running = job([0, 0])
    first, second = (Rank(producer) for producer in running.ranks)
    for index, rank in enumerate((first, second)):
        rank.producer.communicator(COMM, index, range(2))
        rank.producer.write_floats(1, [1.0 + index] * N)
    for handle in (500, 600):
        first.producer.write_floats(handle, [float(handle)] * LARGE)
    first.run(mul_(1, 1, N))
    first.run(add_(600, 600, LARGE, 1))
    first.producer.sync()
    first.all_reduce(1, N)
    first.run(mul_(1, 2, N))  # it waits here
    first.run(add_(600, 600, LARGE, 1))
    for handle in (500, 600):
        first.producer.free(handle)
    held = 4 * (LARGE + N)  # what is still named, and what the sum will be

    def gave_up() -> bool:
        second.producer.write_floats(second.next_handle, [0.0])  # whenever another rank goes on
        second.next_handle += 1
        return running.proxies[0].stats()["ranks"]["0"]["bytes"] == held

    until(gave_up)
    second.all_reduce(1, N)
    assert first.producer.read_floats(1, N) == [6.0] * N
    first.producer.sync()
    assert first.producer.take_error() is None
    assert running.proxies[0].stats()["ranks"]["0"]["bytes"] == 4 * N


def test_each_rank_is_measured_as_if_it_were_alone(job: Callable[..., Any]) -> None:
    """What a resize is judged by: the most that a rank has had, and the most that it gave to be summed in a step."""
    running = job([0, 0, 1])
    ranks = [Rank(producer) for producer in running.ranks]

    def measured() -> list[tuple[int, int]]:
        found = {}
        for proxy in running.proxies:
            found |= proxy.stats()["ranks"]
        return [(found[str(rank)]["peak_bytes"], found[str(rank)]["gradient_bytes"]) for rank in range(3)]

    def program(rank: Rank, index: int) -> None:
        for handle in (1, 2):
            rank.producer.write_floats(handle, [1.0] * N)
        for step in (1, 2):
            rank.producer.write_floats(10 + step, [1.0] * LARGE)
            rank.producer.free(10 + step)
            for handle in (1, 2, 1):  # the same tensor again is no more memory
                rank.all_reduce(handle, N)
            rank.producer.step(step)
        rank.producer.sync()

    together(running.ranks, program)
    expected = [(4 * LARGE + 2 * 4 * N, 2 * 4 * N)] * 3
    assert measured() == expected
    running.cut()
    running.move([0, 1, 1])
    assert measured() == expected
    for rank in ranks:
        rank.producer.sync()
