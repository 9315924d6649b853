"""Which rank of a device goes on, what those that wait keep meanwhile, and what is measured of each."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.proxy_runtime.device.producer import Message, words
from tests.proxy_runtime.device.splice.programs import COMM, Rank, add_, mul_, sin, together
from tests.proxy_runtime.device.splice.test_sharing import N, counters

LARGE = 1 << 14  # floats
SET, CHECK = 0, 3  # of the store


def until(condition: Callable[[], object]) -> None:
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


def test_a_batch_comes_to_the_device_when_it_is_its_ranks_turn(job: Callable[..., Any]) -> None:
    """Ranks that go on together part where each is given something of its own."""
    running = job([0] * 4)

    def program(rank: Rank, index: int) -> None:
        rank.producer.write_floats(1, [1.0] * N)
        rank.producer.write_floats(2, [1.0] * N)
        for step in range(3):
            batch = rank.next_handle
            rank.next_handle += 1
            rank.producer.write_floats(batch, [4.0 * step + index] * LARGE)
            scores = rank.run(sin(batch, LARGE), results=1)
            for handle in (batch, scores):
                rank.producer.free(handle)
            rank.all_reduce(2, N)
            rank.run(add_(1, 2, N))
        rank.producer.sync()

    together(running.ranks, program)
    counted = counters(running)
    assert 2 * 4 * LARGE <= counted["peak_bytes"] < 3 * 4 * LARGE
    assert counted["copies"] == 0 and counted["lockstep_runs"] >= 3


def test_who_has_got_what_it_waited_for_has_its_place_in_the_order_again(job: Callable[..., Any]) -> None:
    """All wait for a sum; the last to give its part goes on at once, but is not next where sums are made in pairs."""
    running = job([0] * 4)
    issued = threading.Semaphore(0)

    def program(rank: Rank, index: int) -> None:
        rank.producer.write_floats(1, [1.0 + index] * LARGE)
        rank.producer.write_floats(2, [1.0] * N)
        rank.producer.write_floats(3, [3.0] * LARGE)  # one for all, until the last has given it up
        if index == 0:
            rank.run(sin(2, N), results=1)  # it has begun its step
        if index == 3:
            for _ in range(3):
                issued.acquire()
            time.sleep(0.05)
        rank.all_reduce(2, N)
        issued.release()
        if index == 3:
            time.sleep(0.02)  # it never has to wait
        rank.producer.read_floats(2, N)
        if index == 0:
            time.sleep(0.05)  # its host is late, and is waited for
        rank.producer.free(3)
        gradient = rank.run(sin(1, LARGE), results=1)
        rank.all_reduce(gradient, LARGE)
        rank.run(mul_(gradient, gradient, LARGE))
        rank.producer.sync()

    together(running.ranks, program)
    # Four inputs, and three of: sums of pairs, what is summed next, what is given up.
    assert counters(running)["peak_bytes"] < 7.5 * 4 * LARGE


def test_what_a_rank_has_alone_is_on_the_host_while_that_stands_still(job: Callable[..., Any]) -> None:
    """As in a job's first steps, where a host stops at every operator that it does not know."""
    running = job([0] * 4)

    def program(rank: Rank, index: int) -> list[float]:
        rank.producer.write_floats(2, [1.0] * N)
        batch = rank.next_handle
        rank.next_handle += 1
        rank.producer.write_floats(batch, [0.5 * index] * LARGE)
        rank.run(sin(2, N), results=1)
        rank.all_reduce(2, N)
        rank.producer.read_floats(2, N)  # all stand here with a batch each
        scores = rank.run(sin(batch, LARGE), results=1)
        rank.all_reduce(2, N)
        rank.producer.read_floats(2, N)  # and here with what has come of it
        return rank.producer.read_floats(batch if index % 2 else scores, LARGE)

    found = together(running.ranks, program)
    for index, values in enumerate(found):
        assert values == pytest.approx([0.5 * index if index % 2 else math.sin(0.5 * index)] * LARGE)
    # What the last to come has, and what is read in the end; eight if all stayed where it is.
    assert counters(running)["peak_bytes"] < 6.5 * 4 * LARGE


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


def test_so_is_what_a_host_that_is_ahead_has_given_up_behind_the_next_wait(job: Callable[..., Any]) -> None:
    running = job([0, 0])
    first, second = (Rank(producer) for producer in running.ranks)
    for index, rank in enumerate((first, second)):
        rank.producer.communicator(COMM, index, range(2))
        rank.producer.write_floats(1, [1.0 + index] * N)
        rank.run(mul_(1, 1, N))
    second.producer.step(1)
    for batch in (500, 600):
        first.producer.write_floats(batch, [float(batch)] * LARGE)
        first.all_reduce(1, N)
        first.run(mul_(1, 1, N))  # it waits here, and has queued all that follows
        first.producer.free(batch)

    def gave_up() -> bool:
        second.producer.write_floats(second.next_handle, [0.0])  # whenever another rank goes on
        second.next_handle += 1
        counted = running.proxies[0].stats()["ranks"]["0"]
        # 4 messages, then 5 a batch, of which it waits at the fourth.
        return (counted["bytes"], counted["messages"]) == (4 * N, 7 + 5 * steps)

    for steps in range(2):
        until(gave_up)
        second.all_reduce(1, N)
        second.run(mul_(1, 1, N))
        second.run(sin(1, N), results=1)  # which the other does not
        second.producer.step(2 + steps)
    first.producer.sync()
    assert first.producer.take_error() is None


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


def is_ready(rank: Rank, handle: int) -> bool:
    return rank.producer.call(Message.READY, words(1, handle)) == b"\1"


def is_set(rank: Rank) -> bool:
    return rank.producer.store(CHECK, b"key")[1] == 1


@pytest.mark.parametrize("in_lockstep", [False, True])
def test_who_asks_for_the_result_of_a_rank_that_waits_for_it_is_not_waited_for(
    job: Callable[..., Any], in_lockstep: bool
) -> None:
    running = job([0, 0])
    asked = threading.Event()

    def program(rank: Rank, index: int) -> list[float]:
        for handle in (1, 2):
            rank.producer.write_floats(handle, [1.0 + index] * N)
        rank.all_reduce(1, N)
        rank.producer.sync()
        if in_lockstep:
            rank.run(mul_(1, 1, N))
        if index == 0:
            asked.wait()
            rank.producer.free(rank.run(sin(1, N), results=1))
        rank.all_reduce(2, N)
        until(lambda: index == 0 or is_ready(rank, 2) or asked.set())
        return rank.producer.read_floats(2, N)

    assert together(running.ranks, program) == [[3.0] * N] * 2
    if not in_lockstep:  # which a host ends that is late for other reasons
        assert counters(running)["timeouts"] == 0


def test_hosts_that_are_all_silent_keep_nobody_waiting(job: Callable[..., Any]) -> None:
    """They load a batch or save a file, all of them: nothing to be counted, and they go on together after it."""
    running = job([0, 0])

    def program(rank: Rank, index: int) -> None:
        rank.producer.write_floats(1, [1.0 + index] * N)
        rank.all_reduce(1, N)
        rank.run(mul_(1, 1, N))
        rank.producer.sync()

    together(running.ranks, program)
    before = counters(running)
    time.sleep(1.5)  # longer than a host is waited for
    after = counters(running)
    assert before["lockstep_runs"] == 1
    assert after["timeouts"] == before["timeouts"]


def test_who_asks_for_a_key_of_a_rank_that_waits_for_it_is_waited_for_as_long_as_any_host(
    job: Callable[..., Any],
) -> None:
    running = job([0, 0])

    def program(rank: Rank, index: int) -> list[float]:
        rank.producer.write_floats(1, [1.0 + index] * N)
        rank.all_reduce(1, N)
        rank.producer.sync()
        if index == 0:
            rank.run(sin(1, N), results=1)
            rank.producer.store(SET, b"key")
        until(lambda: is_set(rank))
        return rank.producer.read_floats(1, N)

    assert together(running.ranks, program) == [[3.0] * N] * 2
    assert counters(running)["timeouts"] == 1


def test_who_asks_for_a_key_leaves_the_turn_to_those_that_work(job: Callable[..., Any]) -> None:
    """It has begun to compute, and comes first; the other sets the key when it has computed."""
    running = job([0, 0])
    asked = threading.Event()

    def program(rank: Rank, index: int) -> None:
        rank.producer.write_floats(1, [1.0 + index] * N)
        if index:
            asked.wait()
        for _ in range(40):
            rank.producer.free(rank.run(sin(1, N), results=1))
        if index:
            rank.producer.sync()
            rank.producer.store(SET, b"key")
        until(lambda: is_set(rank) or asked.set())

    together(running.ranks, program)


@pytest.mark.slow
def test_who_works_without_end_until_a_rank_goes_on_that_waits_for_it_is_not_waited_for(
    job: Callable[..., Any],
) -> None:
    running = job([0, 0])
    over = threading.Event()

    def program(rank: Rank, index: int) -> list[float]:
        rank.producer.write_floats(1, [1.0 + index] * N)
        rank.producer.write_floats(2, [1.0 + index] * 4)  # nothing that is shared
        rank.all_reduce(1, N)
        rank.producer.sync()
        if index == 0:
            rank.run(sin(1, N), results=1)
            over.set()
        deadline = time.monotonic() + 300
        while not over.is_set():
            assert time.monotonic() < deadline
            for _ in range(64):
                rank.run(mul_(2, 1, 4))
            rank.producer.sync()
        return rank.producer.read_floats(1, N)

    for rank in running.ranks:
        rank.deadline_s = 300.0
    assert together(running.ranks, program) == [[3.0] * N] * 2
    # A second one where the first rank's host is slow to say that it is over.
    assert 1 <= counters(running)["timeouts"] <= 2


@pytest.mark.slow
def test_who_works_without_end_until_a_rank_goes_on_that_is_not_next_loses_its_turn(job: Callable[..., Any]) -> None:
    running = job([0, 0])
    begun, over = threading.Event(), threading.Event()

    def program(rank: Rank, index: int) -> None:
        rank.producer.write_floats(1, [1.0 + index] * 4)
        if index == 1:
            begun.wait()
            rank.run(sin(1, 4), results=1)
            over.set()
        deadline = time.monotonic() + 200
        while not over.is_set():
            assert time.monotonic() < deadline
            for _ in range(64):
                rank.run(mul_(1, 1, 4))
            rank.producer.sync()
            begun.set()

    for rank in running.ranks:
        rank.deadline_s = 250.0
    together(running.ranks, program)
    assert counters(running)["timeouts"] == 1
