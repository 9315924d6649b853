"""Sums that are begun before all members have contributed: their bytes, their bits, across cuts and on errors."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.proxy_runtime.device.producer import FLOAT32, RemoteError, tensor_key
from tests.proxy_runtime.device.splice.programs import ALL_REDUCE, COMM, Rank

LARGE, SMALL = 8192, 64  # floats: more and less than what is summed early
SUM, AVG, MAX = 0, 1, 4  # ReduceOp
INT32 = 3  # ScalarType


def values(seed: int, n: int = LARGE) -> np.ndarray:
    """Such that the order of additions is seen in the bits."""
    draw = random.Random(seed)
    return np.array([draw.uniform(-1, 1) * 10 ** draw.randint(-4, 4) for _ in range(n)], np.float32)


def tree(leaves: list[np.ndarray]) -> np.ndarray:
    """The sum in the order that `docs/distributed.md` gives."""
    if len(leaves) == 1:
        return leaves[0]
    middle = 1 << (len(leaves) - 1).bit_length() - 1
    return tree(leaves[:middle]) + tree(leaves[middle:])


def contribute(
    running: Any, ranks: list[Rank], index: int, n: int = LARGE, op: int = SUM, dtype: int = FLOAT32
) -> None:
    """The rank gives its values; done when they have been taken."""
    rank = ranks[index]
    rank.producer.communicator(COMM, index, range(len(ranks)))
    rank.producer.write(1, values(index, n).tobytes())
    key = tensor_key([n], dtype=dtype)
    rank.producer.collective(COMM, ALL_REDUCE, [(key, 1)], [(key, 1)], op=op)
    if index < len(ranks) - 1:
        deadline = time.monotonic() + 30
        while running.proxy_of(index).stats()["ranks"][str(index)]["pending"] == 0:
            assert time.monotonic() < deadline


def read(rank: Rank, n: int = LARGE) -> np.ndarray:
    return np.frombuffer(rank.producer.read(1, 4 * n), np.float32)


def started(job: Callable[..., Any], placement: list[int]) -> tuple[Any, list[Rank]]:
    running = job(placement)
    ranks = [Rank(producer) for producer in running.ranks]
    for rank in ranks:
        rank.producer.alloc(1, 4 * LARGE)
    return running, ranks


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_sums_are_made_as_their_members_come(job: Callable[..., Any], world: int) -> None:
    running = job([0] * world)
    ranks = [Rank(producer) for producer in running.ranks]
    for index, rank in enumerate(ranks):
        rank.producer.alloc(1, 4 * LARGE)
        contribute(running, ranks, index)
    for rank in ranks:
        assert read(rank).tobytes() == tree([values(i) for i in range(world)]).tobytes()
    counted = running.proxies[0].stats()["splice"]
    assert counted["physical_bytes"] == 4 * LARGE
    # One rank's, and a sum per level of the tree; nothing is packed beside the tensor that it is.
    assert counted["peak_bytes"] <= (1 + math.ceil(math.log2(world))) * 4 * LARGE


@pytest.mark.parametrize("op", [SUM, AVG])
@pytest.mark.parametrize("come", [1, 2, 3, 4])
def test_a_cut_of_a_sum_in_the_making(job: Callable[..., Any], come: int, op: int) -> None:
    running, ranks = started(job, [0] * 5)
    for index in range(come):
        contribute(running, ranks, index, op=op)
    for placement in ([0, 1, 0, 1, 0], [0] * 5, [4, 3, 2, 1, 0]):
        running.cut()
        running.move(placement)
    for index in range(come, 5):
        contribute(running, ranks, index, op=op)
    total = tree([values(i) for i in range(5)])
    expected = total / np.float32(5) if op == AVG else total
    for rank in ranks:
        assert read(rank).tobytes() == expected.tobytes()


def test_members_that_disagree_on_little_have_their_tensors_as_they_were(job: Callable[..., Any]) -> None:
    running, ranks = started(job, [0] * 3)
    for index in range(3):
        contribute(running, ranks, index, SMALL - index // 2)
    for index, rank in enumerate(ranks):
        n = SMALL - index // 2
        assert read(rank, n).tobytes() == values(index, n).tobytes()
        assert "of the same size and dtype" in (rank.producer.take_error() or "")


OTHERWISE: dict[str, dict[str, int]] = {"size": {"n": LARGE - 1}, "dtype": {"dtype": INT32}, "reduction": {"op": MAX}}


@pytest.mark.parametrize("how", OTHERWISE)
def test_members_that_disagree_after_a_sum_was_begun_are_told(job: Callable[..., Any], how: str) -> None:
    running, ranks = started(job, [0] * 3)
    for index in range(3):
        contribute(running, ranks, index, **(OTHERWISE[how] if index == 2 else {}))
    for index, rank in enumerate(ranks):
        if index < 2:  # what the two had given was one sum by then: nobody takes that, or anything else, for theirs
            with pytest.raises(RemoteError, match="result of an operation that failed"):
                read(rank)
        else:
            assert read(rank).tobytes()[: 4 * LARGE - 4] == values(2).tobytes()[: 4 * LARGE - 4]
        assert (rank.producer.take_error() or "").count("of the same size and dtype") == 1
        rank.producer.free(1)
        rank.producer.sync()
        assert rank.producer.take_error() is None
    assert running.proxies[0].stats()["splice"]["physical_bytes"] == 0


def test_parts_of_tensors_are_given_as_copies_and_stay_as_they_were(job: Callable[..., Any]) -> None:
    running, ranks = started(job, [0] * 3)
    for index in range(3):
        contribute(running, ranks, index, LARGE - 1 - index // 2)
    for index, rank in enumerate(ranks):
        n = LARGE - 1 - index // 2
        assert read(rank, n).tobytes() == values(index, n).tobytes()
        assert "of the same size and dtype" in (rank.producer.take_error() or "")


@pytest.mark.parametrize("placement", [[0, 1, 2], [0, 0, 1]])
def test_a_sum_that_fails_after_a_cut_gives_back_what_there_is(job: Callable[..., Any], placement: list[int]) -> None:
    running, ranks = started(job, [0] * 3)
    for index in range(2):
        contribute(running, ranks, index)
    running.cut()
    running.move(placement)
    contribute(running, ranks, 2, LARGE - 1)
    for rank in ranks[:2]:
        with pytest.raises(RemoteError, match="result of an operation that failed"):
            read(rank)
    assert read(ranks[2], LARGE - 1).tobytes() == values(2, LARGE - 1).tobytes()
