"""Collective messages in every kind and shape: tensors in, bytes through the engine, tensors out."""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from tests.proxy_runtime.device.producer import Producer, tensor_key

BFLOAT16 = 15  # ScalarType
W = 3
COMM = 7


class Kind(IntEnum):
    ALL_REDUCE = 0
    BROADCAST = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    REDUCE = 4
    GATHER = 5
    SCATTER = 6
    ALL_TO_ALL = 7
    SEND = 8
    RECV = 9
    BARRIER = 10


@pytest.fixture(params=[[0, 0, 0], [0, 0, 1], [0, 1, 2]], ids=["one-proxy", "two", "three"])
def ranks(job: Callable[..., Any], request: pytest.FixtureRequest) -> list[Producer]:
    """Three ranks with a communicator of all."""
    producers = job(request.param).ranks
    for index, rank in enumerate(producers):
        rank.communicator(COMM, index, range(W))
    return producers


def value(rank: int, handle: int, n: int) -> list[float]:
    return [float(100 * rank + 10 * handle + i) for i in range(n)]


def fill(ranks: list[Producer], handle: int, n: int) -> None:
    for index, rank in enumerate(ranks):
        rank.write_floats(handle, value(index, handle, n))


def refs(*sized: tuple[int, int]) -> list[tuple[bytes, int]]:
    """(handle, elements) as references to whole storages."""
    return [(tensor_key([n]), handle) for handle, n in sized]


def test_all_reduce_of_several_tensors(ranks: list[Producer]) -> None:
    fill(ranks, 1, 5)
    fill(ranks, 2, 3)
    for rank in ranks:
        rank.collective(COMM, Kind.ALL_REDUCE, refs((1, 5), (2, 3)), refs((1, 5), (2, 3)))
    for rank in ranks:
        assert rank.read_floats(1, 5) == [330 + 3 * i for i in range(5)]
        assert rank.read_floats(2, 3) == [360 + 3 * i for i in range(3)]


@pytest.mark.parametrize(("op", "expected"), [(1, 120.0), (2, 20.0 * 120 * 220), (3, 20.0), (4, 220.0)])
def test_reductions(ranks: list[Producer], op: int, expected: float) -> None:
    fill(ranks, 2, 1)
    for rank in ranks:
        rank.collective(COMM, Kind.ALL_REDUCE, refs((2, 1)), refs((2, 1)), op=op)
    assert [rank.read_floats(2, 1) for rank in ranks] == [[expected]] * W


def test_reduction_order_is_the_tree_in_the_tensors_own_dtype(ranks: list[Producer]) -> None:
    # In bfloat16 256 + 1 is 256: the order and the rounding after every addition show.
    numbers = [0x4380, 0x3F80, 0x3F80]  # 256, 1, 1
    for rank, number in zip(ranks, numbers, strict=True):
        rank.alloc(1, 2)
        rank.write(1, struct.pack("=H", number))
        tensor = [(tensor_key([1], dtype=BFLOAT16), 1)]
        rank.collective(COMM, Kind.ALL_REDUCE, tensor, tensor)
    assert [struct.unpack("=H", rank.read(1, 2))[0] for rank in ranks] == [0x4380] * W


def test_a_large_all_reduce_is_the_same_tree(ranks: list[Producer]) -> None:
    n = 40_000  # 160 KB: reduced in chunks by their owners
    generator = np.random.default_rng(1)
    data = [generator.standard_normal(n, dtype=np.float32) for _ in ranks]
    for rank, array in zip(ranks, data, strict=True):
        rank.alloc(1, 4 * n)
        for at in range(0, 4 * n, 1 << 15):
            rank.write(1, array.tobytes()[at : at + (1 << 15)], offset=at)
        rank.collective(COMM, Kind.ALL_REDUCE, refs((1, n)), refs((1, n)))
    expected = ((data[0] + data[1]) + data[2]).tobytes()
    for rank in ranks:
        chunks = [rank.read(1, min(1 << 15, 4 * n - at), offset=at) for at in range(0, 4 * n, 1 << 15)]
        assert b"".join(chunks) == expected


def test_broadcast_and_reduce_touch_only_whom_they_should(ranks: list[Producer]) -> None:
    fill(ranks, 1, 4)
    fill(ranks, 2, 4)
    for rank in ranks:
        rank.collective(COMM, Kind.BROADCAST, [], refs((1, 4)), root=2)
        rank.collective(COMM, Kind.REDUCE, refs((2, 4)), refs((2, 4)), root=1)
    for index, rank in enumerate(ranks):
        assert rank.read_floats(1, 4) == value(2, 1, 4)
        assert rank.read_floats(2, 4) == ([360 + 3 * i for i in range(4)] if index == 1 else value(index, 2, 4))


@pytest.mark.parametrize("whole", [False, True])
def test_gathering(ranks: list[Producer], whole: bool) -> None:
    fill(ranks, 1, 2)
    everything = [x for index in range(W) for x in value(index, 1, 2)]
    for rank in ranks:
        for handle in (2, 3, 4):
            rank.write_floats(handle, [0.0] * 6)
        outputs = refs((2, 6)) if whole else refs((2, 2), (3, 2), (4, 2))
        rank.collective(COMM, Kind.ALL_GATHER, refs((1, 2)), outputs)
    for rank in ranks:
        got = rank.read_floats(2, 6) if whole else [x for h in (2, 3, 4) for x in rank.read_floats(h, 2)]
        assert got == everything


@pytest.mark.parametrize("whole", [False, True])
def test_reduce_scatter(ranks: list[Producer], whole: bool) -> None:
    for handle in (1, 2, 3):
        fill(ranks, handle, 6)
    fill(ranks, 4, 2)
    for rank in ranks:
        inputs = refs((1, 6)) if whole else refs((1, 2), (2, 2), (3, 2))
        rank.collective(COMM, Kind.REDUCE_SCATTER, inputs, refs((4, 2)))
    for index, rank in enumerate(ranks):
        start = [330 + 6 * index, 333 + 6 * index] if whole else [330 + 30 * index, 333 + 30 * index]
        assert rank.read_floats(4, 2) == start


def test_gather_and_scatter_at_a_root(ranks: list[Producer]) -> None:
    for handle in (1, 2, 3, 4, 5):
        fill(ranks, handle, 2)
    root = 1
    for index, rank in enumerate(ranks):
        many = refs((2, 2), (3, 2), (4, 2)) if index == root else []
        rank.collective(COMM, Kind.GATHER, refs((1, 2)), many, root=root)
        rank.collective(COMM, Kind.SCATTER, many, refs((5, 2)), root=root)
    assert [ranks[root].read_floats(handle, 2) for handle in (2, 3, 4)] == [value(i, 1, 2) for i in range(W)]
    assert [rank.read_floats(5, 2) for rank in ranks] == [value(i, 1, 2) for i in range(W)]


def test_all_to_all_with_and_without_splits(ranks: list[Producer]) -> None:
    fill(ranks, 1, 6)
    fill(ranks, 2, 6)
    splits = [[1, 2, 3], [0, 4, 2], [3, 3, 0]]  # of the sender, per receiver
    for index, rank in enumerate(ranks):
        rank.collective(COMM, Kind.ALL_TO_ALL, refs((1, 6)), refs((2, 6)))
        received = [splits[sender][index] for sender in range(W)]
        rank.write_floats(3, [0.0] * sum(received))
        rank.collective(
            COMM, Kind.ALL_TO_ALL, refs((1, 6)), refs((3, sum(received))), extra=[*splits[index], *received]
        )
    for index, rank in enumerate(ranks):
        assert rank.read_floats(2, 6) == [x for s in range(W) for x in value(s, 1, 6)[2 * index : 2 * index + 2]]
        expected = []
        for sender in range(W):
            at = sum(splits[sender][:index])
            expected += value(sender, 1, 6)[at : at + splits[sender][index]]
        assert rank.read_floats(3, len(expected)) == expected


def test_send_and_receive_beside_a_collective(ranks: list[Producer]) -> None:
    fill(ranks, 1, 3)
    fill(ranks, 2, 3)
    ranks[0].collective(COMM, Kind.SEND, refs((1, 3)), root=2)
    ranks[2].collective(COMM, Kind.RECV, [], refs((2, 3)), root=0)
    assert ranks[2].read_floats(2, 3) == value(0, 1, 3)
    for rank in ranks:
        rank.collective(COMM, Kind.BARRIER)
    for rank in ranks:
        rank.sync()


def test_strided_tensors_and_parts_of_storages(ranks: list[Producer]) -> None:
    """A transposed view, and a slice that leaves its neighbours alone."""
    fill(ranks, 1, 6)
    fill(ranks, 2, 6)
    for rank in ranks:
        transposed = [(tensor_key([3, 2], strides=[1, 3]), 1)]
        rank.collective(COMM, Kind.ALL_REDUCE, transposed, transposed)
        part = [(tensor_key([2], strides=[1], offset=3), 2)]
        rank.collective(COMM, Kind.BROADCAST, [], part, root=0)
    for index, rank in enumerate(ranks):
        assert rank.read_floats(1, 6) == [330 + 3 * i for i in range(6)]
        own = value(index, 2, 6)
        assert rank.read_floats(2, 6) == [*own[:3], *value(0, 2, 6)[3:5], own[5]]


def test_an_all_gather_into_a_strided_tensor(ranks: list[Producer]) -> None:
    fill(ranks, 1, 2)
    for rank in ranks:
        rank.write_floats(2, [0.0] * 6)
        rank.collective(COMM, Kind.ALL_GATHER, refs((1, 2)), [(tensor_key([3, 2], strides=[1, 3]), 2)])
    gathered = np.array([value(i, 1, 2) for i in range(W)])
    for rank in ranks:
        assert rank.read_floats(2, 6) == gathered.T.flatten().tolist()


def test_ranks_that_disagree_get_an_error_and_go_on(ranks: list[Producer]) -> None:
    fill(ranks, 1, 4)
    for index, rank in enumerate(ranks):
        n = 3 if index == 1 else 4
        rank.collective(COMM, Kind.ALL_REDUCE, refs((1, n)), refs((1, n)))
    for rank in ranks:
        rank.sync()
    errors = {rank.take_error() for rank in ranks}
    assert len(errors) == 1 and None not in errors
    for index, rank in enumerate(ranks):
        assert rank.read_floats(1, 4) == value(index, 1, 4)
        rank.collective(COMM, Kind.ALL_REDUCE, refs((1, 4)), refs((1, 4)))
    assert ranks[0].read_floats(1, 4) == [330 + 3 * i for i in range(4)]


def test_misuse_is_the_scripts_error_not_the_end_of_the_rank(ranks: list[Producer]) -> None:
    fill(ranks, 1, 4)
    rank = ranks[0]
    rank.collective(COMM, Kind.REDUCE_SCATTER, refs((1, 4)), refs((1, 1)))  # 4 elements among 3 ranks
    rank.sync()
    assert "cannot be split among 3" in (rank.take_error() or "")
    rank.collective(COMM, Kind.ALL_TO_ALL, refs((1, 4)), refs((1, 4)), extra=[1, 1, 9, 1, 1, 2])
    rank.sync()
    assert "exceed" in (rank.take_error() or "")
    assert not rank.ring.proxy_gone


def test_subgroups_and_repeated_definitions(ranks: list[Producer]) -> None:
    fill(ranks, 1, 2)
    for index, rank in ((0, ranks[0]), (1, ranks[2])):
        rank.communicator(8, index, [0, 2])
        rank.communicator(8, index, [0, 2])
        rank.collective(8, Kind.ALL_REDUCE, refs((1, 2)), refs((1, 2)))
    assert ranks[0].read_floats(1, 2) == ranks[2].read_floats(1, 2) == [220.0, 222.0]
    assert ranks[1].read_floats(1, 2) == value(1, 1, 2)
