"""Each mechanism of sharing by value, on raw messages."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.proxy_runtime.device.producer import INT64, Message, Op, RemoteError, Tag, tensor_key, words
from tests.proxy_runtime.device.splice.programs import (
    COMM,
    Rank,
    add_,
    batch_norm,
    copy,
    foreach_mul_,
    mul_,
    normal_,
    sin,
    together,
    zero_,
)

N = 2048  # floats: 8 KiB, more than what is copied without waiting
VALUES = [0.5 * i for i in range(N)]


@pytest.fixture
def pair(job: Callable[..., Any]) -> Any:
    """Two ranks on one device."""
    return job([0, 0])


def settled(*ranks: Rank) -> None:
    """What they have sent has been done."""
    for rank in ranks:
        rank.producer.sync()


def counters(job: Any) -> dict[str, int]:
    return job.proxies[0].stats()["splice"]


def floats(rank: Rank, handle: int, n: int = N) -> list[float]:
    return rank.producer.read_floats(handle, n)


def test_one_rank_alone_has_no_numbers(job: Callable[..., Any]) -> None:
    assert "splice" not in job([0]).proxies[0].stats()


def test_what_a_load_finds_equal_is_kept_once(job: Callable[..., Any]) -> None:
    running = job([0, 1])
    for index, rank in enumerate(running.ranks):
        rank.write_floats(1, VALUES)
        rank.write_floats(2, [0.0] * N)
        rank.write_floats(3, [0.0] * N)  # equal to its neighbour, and never the same storage
        rank.write_floats(4, [1.0 + index] * N)
        rank.sync()
    running.cut()
    running.move([0, 0], run=False)
    assert running.proxies[0].stats()["physical_bytes"] == 5 * 4 * N  # not even while they are loaded
    running.proxies[0].run()
    counted = counters(running)
    assert counted["logical_bytes"] == 8 * 4 * N
    assert counted["peak_bytes"] == 5 * 4 * N
    assert counted["physical_bytes"] == 5 * 4 * N
    assert counted["merged_bytes"] == 3 * 4 * N
    for index, rank in enumerate(running.ranks):
        assert rank.read_floats(1, N) == VALUES
        assert rank.read_floats(4, N) == [1.0 + index] * N


def test_after_a_load_the_first_to_write_what_is_shared_waits_for_the_others(job: Callable[..., Any]) -> None:
    """The cut has found them behind the collectives of a step, none of which leads them together any more."""
    running = job([0, 1])
    for rank in running.ranks:
        rank.write_floats(1, VALUES)
        rank.sync()
    running.cut()
    running.move([0, 0])

    def program(rank: Rank, index: int) -> list[float]:
        rank.run(mul_(1, 3, N))
        return floats(rank, 1)

    assert together(running.ranks, program) == [[3 * value for value in VALUES]] * 2
    counted = counters(running)
    assert counted["copies"] == 0 and counted["physical_bytes"] == 4 * N


def test_a_rank_that_a_cut_finds_a_step_behind_shares_again_when_it_has_made_it(job: Callable[..., Any]) -> None:
    weights, steps, gradient = 1, 2, 3
    running = job([0, 1, 2])
    ranks = [Rank(producer) for producer in running.ranks]
    for index, rank in enumerate(ranks):
        rank.producer.communicator(COMM, index, range(3))
        for handle in (weights, steps):
            rank.producer.write_floats(handle, VALUES)
        rank.producer.write_floats(gradient, [1.0] * N)

    def step(index: int) -> None:
        ranks[index].run(mul_(steps, 3, N))
        ranks[index].run(add_(weights, gradient, N))

    for index in range(2):
        step(index)
    settled(*ranks)
    running.cut()
    running.move([0, 0, 0])

    step(2)
    settled(ranks[2])
    assert counters(running)["physical_bytes"] == 5 * 4 * N
    for _ in range(2):
        for index, rank in enumerate(ranks):
            rank.all_reduce(gradient, N)
            step(index)
    settled(*ranks)
    for rank in ranks:
        assert floats(rank, weights) == [value + 1 + 3 + 9 for value in VALUES]
        assert floats(rank, steps) == [27 * value for value in VALUES]
    counted = counters(running)
    assert counted["copies"] == 0 and counted["physical_bytes"] == 3 * 4 * N


def test_a_rank_that_makes_its_state_late_is_waited_for(job: Callable[..., Any]) -> None:
    """The others' step counters are not its own yet when they are about to be written: the weights after them are."""
    running = job([0, 0, 0])
    weights, gradient, steps = 1, 2, 3
    begun = threading.Barrier(3)

    def program(rank: Rank, index: int) -> list[float]:
        late = index == 2
        rank.producer.write_floats(weights, VALUES)
        rank.producer.write_floats(gradient, [1.0] * N)
        if not late:
            rank.producer.write_floats(steps, [1.0] * N)
        settled(rank)
        begun.wait(60)
        rank.all_reduce(gradient, N)
        if late:
            time.sleep(0.2)  # the others stand before their first write by then
            rank.producer.write_floats(steps, [1.0] * N)
        rank.run(mul_(steps, 2, N))
        rank.run(mul_(weights, 3, N))
        return floats(rank, weights)

    assert together(running.ranks, program) == [[3 * value for value in VALUES]] * 3
    assert counters(running)["copies"] == 0


def test_a_rank_that_has_passed_where_the_others_wait_is_met_where_it_waits(job: Callable[..., Any]) -> None:
    """It has written its step counters before the others had theirs: the weights after them are written together."""
    running = job([0, 0, 0])
    weights, gradient, steps = 1, 2, 3
    passed, made = threading.Event(), threading.Barrier(2)

    def program(rank: Rank, index: int) -> list[float]:
        rank.producer.write_floats(weights, VALUES)
        rank.producer.write_floats(gradient, [1.0] * N)
        settled(rank)
        rank.all_reduce(gradient, N)
        if index < 2:
            assert passed.wait(60)
        rank.producer.write_floats(steps, [1.0] * N)
        if index < 2:
            settled(rank)
            made.wait(60)
        rank.run(mul_(steps, 2, N))
        if index == 2:
            settled(rank)
            passed.set()
        for _ in range(2):
            rank.run(mul_(weights, 3, N))
            rank.run(mul_(steps, 2, N))
        return floats(rank, weights)

    assert together(running.ranks, program) == [[9 * value for value in VALUES]] * 3
    counted = counters(running)
    assert counted["copies"] == counted["timeouts"] == 0
    assert counted["executed"] == 5 and counted["physical_bytes"] == 3 * 4 * N


def test_the_same_call_on_the_same_values_runs_once(pair: Any) -> None:
    def program(rank: Rank, index: int) -> list[float]:
        rank.producer.write_floats(1, VALUES)
        result = rank.run(sin(1, N), results=1)
        return floats(rank, result)

    one, other = together(pair.ranks, program)
    assert one == other
    counted = counters(pair)
    assert counted["executed"] == 1
    assert counted["physical_bytes"] == 2 * 4 * N


def test_a_write_to_what_is_shared_is_the_writers_own(pair: Any) -> None:
    first, second = (Rank(p) for p in pair.ranks)
    for rank in (first, second):
        rank.producer.write_floats(1, VALUES)
    settled(first, second)
    first.run(mul_(1, 3, N))
    assert floats(second, 1) == VALUES
    assert floats(first, 1) == [3 * v for v in VALUES]
    assert counters(pair)["copies"] == 1
    second.run(mul_(1, 3, N))  # alone with it now: in place, and equal again
    assert floats(second, 1) == floats(first, 1)
    counted = counters(pair)
    assert (counted["copies"], counted["physical_bytes"]) == (1, 4 * N)


def test_a_list_that_is_shared_in_part_is_copied_in_that_part(pair: Any) -> None:
    first, second = (Rank(p) for p in pair.ranks)
    for index, rank in enumerate((first, second)):
        rank.producer.write_floats(1, VALUES)
        rank.producer.write_floats(2, [float(index)] * N)
    settled(first, second)
    first.run(foreach_mul_([1, 2], 2, N))
    assert counters(pair)["copies"] == 1
    assert floats(second, 1) == VALUES
    assert floats(second, 2) == [1.0] * N


def test_overwriting_what_is_shared_copies_nothing(pair: Any) -> None:
    first, second = (Rank(p) for p in pair.ranks)
    for index, rank in enumerate((first, second)):
        rank.producer.write_floats(1, VALUES)
        rank.producer.write_floats(2, [7.0 + index] * N)
    settled(first, second)
    half = N // 2
    first.run(copy(1, 2, half, source_n=N))
    assert floats(second, 1) == VALUES
    assert counters(pair)["copies"] == 0
    first.run(copy(1, 2, half, offset=half, source_n=N))
    assert floats(first, 1) == [7.0] * N
    assert counters(pair)["copies"] == 0
    second.run(zero_(1, N))
    assert floats(second, 1) == [0.0] * N
    assert counters(pair)["copies"] == 0


def test_what_was_not_overwritten_is_read_from_where_it_is(pair: Any) -> None:
    first, second = (Rank(p) for p in pair.ranks)
    for rank in (first, second):
        rank.producer.write_floats(1, VALUES)
        rank.producer.write_floats(2, [7.0] * N)
    settled(first, second)
    first.run(copy(1, 2, N // 4, offset=N // 2, source_n=N))
    second.run(mul_(1, 2, N))  # what the first still lacks is changed by its other owner
    assert floats(first, 1) == VALUES[: N // 2] + [7.0] * (N // 4) + VALUES[3 * N // 4 :]
    assert floats(second, 1) == [2 * v for v in VALUES]


def test_statistics_that_batch_norm_writes_without_saying_so_are_each_ranks_own(pair: Any) -> None:
    first, second = (Rank(p) for p in pair.ranks)
    for index, rank in enumerate((first, second)):
        rank.producer.write_floats(1, [float(i + index) for i in range(N)])
        rank.producer.write_floats(2, [0.0] * 4)
        rank.producer.write_floats(3, [1.0] * 4)
    settled(first, second)
    first.run(batch_norm(1, 2, 3, N), results=3)
    assert floats(second, 2, 4) == [0.0] * 4
    mean = floats(first, 2, 4)
    assert mean != [0.0] * 4
    second.run(batch_norm(1, 2, 3, N), results=3)
    assert floats(first, 2, 4) == mean
    assert floats(second, 2, 4) != mean


def test_random_numbers_are_drawn_by_every_rank(pair: Any) -> None:
    def program(rank: Rank, index: int) -> list[bytes]:
        rank.seed(5)
        found = []
        for handle in (1, 2):
            rank.producer.alloc(handle, 4 * N)
            rank.run(normal_(handle, N))
            found.append(rank.producer.read(handle, 4 * N))
        found.append(rank.producer.call(Message.GET_RNG, words(0)))
        return found

    one, other = together(pair.ranks, program)
    assert one == other
    counted = counters(pair)
    assert counted["executed"] == 4
    assert counted["physical_bytes"] == 2 * 4 * N  # the values are the same


def step(rank: Rank, index: int, steps: int = 3) -> list[bytes]:
    """Data parallel: gradients of its own, one sum, the same update of what all share."""
    for handle, value in ((1, 1.0), (2, 0.0)):  # a parameter and its momentum
        rank.producer.write_floats(handle, [value] * N)
    for _ in range(steps):
        gradient = rank.next_handle
        rank.next_handle += 1
        rank.producer.write_floats(gradient, [0.25 * index + 0.5] * N)
        rank.all_reduce(gradient, N)
        rank.run(mul_(2, 2, N))
        rank.run(add_(2, gradient, N))
        rank.run(add_(1, 2, N, -1))
        rank.producer.free(gradient)
    return [rank.producer.read(handle, 4 * N) for handle in (1, 2)]


@pytest.mark.parametrize("world", [2, 4])
def test_what_follows_a_sum_runs_once_and_in_place(job: Callable[..., Any], world: int) -> None:
    alone = together(job(list(range(world))).ranks, step)
    running = job([0] * world)
    assert together(running.ranks, step) == alone
    counted = counters(running)
    # The parameter's momentum is written before the sum is looked at: that is where the ranks meet.
    assert counted["copies"] == 0
    assert counted["physical_bytes"] == 2 * 4 * N
    assert counted["executed"] == 9
    assert counted["timeouts"] == 0


def test_a_cut_while_ranks_wait_for_each_other(job: Callable[..., Any]) -> None:
    running = job([0, 0])
    first, second = (Rank(p) for p in running.ranks)
    for index, rank in enumerate((first, second)):
        rank.producer.communicator(7, index, range(2))
        rank.producer.write_floats(1, [1.0 + index] * N)
        rank.producer.write_floats(2, VALUES)
        rank.run(add_(2, 1, N))
        rank.all_reduce(1, N)
    settled(first, second)
    first.run(add_(2, 1, N))  # known already, so not waited for; held: the second has not come
    for placement in ([0, 1], [0, 0]):
        running.cut()
        running.move(placement)
    second.run(add_(2, 1, N))
    for index, rank in enumerate((first, second)):
        assert floats(rank, 1) == [3.0] * N
        assert floats(rank, 2) == [v + 1 + index + 3 for v in VALUES]


def test_an_operator_that_fails_for_all_fails_for_each(pair: Any) -> None:
    pick = Op("aten::index_select", tensor_key([4]) + words(Tag.INT, 0) + tensor_key([2], dtype=INT64), [1, 2])

    def program(rank: Rank, index: int) -> tuple[str, list[float]]:
        producer = rank.producer
        producer.write_floats(1, [1.0, 2.0, 3.0, 4.0])
        producer.alloc(2, 16)
        producer.write(2, struct.pack("=2q", 0, 1))
        producer.write_floats(3, [0.0] * 4)
        rank.run(pick, results=1)
        rank.all_reduce(3, 4)
        producer.write(2, struct.pack("=2q", 0, 99))
        rank.run(add_(3, 1, 4))  # together from here
        lost = rank.run(pick, results=1)
        producer.sync()
        error = producer.take_error() or ""
        with pytest.raises(RemoteError, match="does not exist"):
            producer.read(lost, 4)
        return error, floats(rank, 3, 4)

    one, other = together(pair.ranks, program)
    assert one == other
    assert "out of range" in one[0]  # type: ignore[index]


def test_what_a_rank_shared_is_its_peers_alone_when_it_ends(pair: Any) -> None:
    first, second = (Rank(p) for p in pair.ranks)
    for rank in (first, second):
        rank.producer.write_floats(1, VALUES)
        rank.producer.sync()
    first.producer.send(Message.EXIT)
    while counters(pair)["logical_bytes"] != 4 * N:
        pass
    second.run(mul_(1, 2, N))
    assert floats(second, 1) == [2 * v for v in VALUES]
    assert counters(pair)["copies"] == 0


@pytest.mark.slow
def test_a_rank_whose_host_waits_for_its_peers_host_is_let_go(pair: Any) -> None:
    first, second = (Rank(p) for p in pair.ranks)
    for index, rank in enumerate((first, second)):
        rank.producer.communicator(7, index, range(2))
        rank.producer.write_floats(1, [1.0 + index] * N)
        rank.all_reduce(1, N)
    settled(first, second)
    result = first.run(sin(1, N), results=1)  # the second's host does nothing until it has seen this
    assert len(floats(first, result)) == N
    assert counters(pair)["timeouts"] >= 1
    assert floats(second, 1) == [3.0] * N


def test_an_operator_that_only_one_rank_has_met_is_learnt_in_lockstep(job: Callable[..., Any]) -> None:
    running = job([0, 0])

    def program(rank: Rank, index: int) -> set[float]:
        for handle in (1, 2):
            rank.producer.write_floats(handle, VALUES)
        if index == 0:
            rank.producer.free(rank.run(sin(1, N), results=1))
        rank.all_reduce(2, N)
        rank.producer.sync()
        rank.producer.free(rank.run(sin(2, N), results=1))  # one sends it, the other defines it
        rank.write(1, [1.0 + index] * N)
        return set(floats(rank, rank.run(sin(1, N), results=1)))

    first, second = together(running.ranks, program)
    assert first != second
