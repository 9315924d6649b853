"""Random programs of several ranks, on one device and on a device each: every bit of every storage is the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.proxy_runtime.device.producer import Message, words
from tests.proxy_runtime.device.splice.programs import (
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

SIZES = (4, 16, 1100)
STORAGES = range(1, 13)


def size_of(handle: int) -> int:
    return SIZES[handle % 3]


def program(seed: int, length: int) -> list[tuple[Any, ...]]:
    """Instructions; `same` says whether all ranks do it, or else which one."""
    rng = random.Random(seed)
    found: list[tuple[Any, ...]] = []
    for _ in range(length):
        handle = rng.choice(STORAGES)
        same_size = [h for h in STORAGES if size_of(h) == size_of(handle) and h != handle]
        kind = rng.choices(
            ["write", "part", "mul", "add", "copy", "view", "zero", "normal", "foreach", "norm", "sin", "reduce",
             "reduce_part", "broadcast", "seed", "free", "resize", "read"],
            [4, 2, 6, 6, 4, 4, 2, 2, 4, 2, 5, 5, 1, 3, 1, 1, 1, 1],
        )[0]  # fmt: skip
        collective = kind in ("reduce", "reduce_part", "broadcast")
        who = None if collective or rng.random() < 0.8 else rng.randrange(4)
        found.append((kind, who, handle, rng.choice(same_size), rng.randrange(5), rng.random() < 0.6))
    return found


def perform(rank: Rank, index: int, world: int, instructions: list[tuple[Any, ...]], seed: int) -> list[bytes]:
    for handle in STORAGES:
        rank.producer.alloc(handle, 4 * size_of(handle))
        start = 1 if handle % 2 else 1 + index  # every other storage begins the same on all ranks
        rank.write(handle, [start + 0.5 * i for i in range(size_of(handle))])
    rank.seed(seed if seed % 2 else seed + index)
    reads: list[bytes] = []
    for kind, who, handle, other, number, same in instructions:
        if who is not None and who % world != index:
            continue
        n = size_of(handle)
        mine = number if same else number + index
        match kind:
            case "write":
                rank.write(handle, [0.25 * mine + i for i in range(n)])
            case "part":
                rank.write(handle, [1.5 * mine] * (n // 2), offset=n // 4)
            case "mul":
                rank.run(mul_(handle, 1 + mine % 3, n))
            case "add":
                rank.run(add_(handle, other, n, 1 - mine % 3))
            case "copy":
                rank.run(copy(handle, other, n))
            case "view":
                part = n // 2
                rank.run(copy(handle, other, part, offset=(number % 2) * part, source_n=n))
            case "zero":
                rank.run(zero_(handle, n))
            case "normal":
                rank.run(normal_(handle, n))
            case "foreach":
                rank.run(foreach_mul_([handle, other], 1 + mine % 2, n))
            case "norm":
                rank.run(batch_norm(2, 3, 6, 1100), results=3)
            case "sin":
                result = rank.run(sin(handle, n), results=1)
                rank.run(copy(other, result, n))
                rank.producer.free(result)
            case "reduce":
                rank.all_reduce(handle, n)
            case "reduce_part":
                rank.all_reduce(handle, n // 2, offset=n // 4)
            case "broadcast":
                rank.broadcast(handle, n, root=number % world)
            case "seed":
                rank.seed(mine)
            case "free":
                rank.producer.free(handle)
                rank.producer.alloc(handle, 4 * n)
                rank.write(handle, [float(mine)] * n)
            case "resize":
                rank.producer.resize(handle, 8 * n)
                rank.producer.resize(handle, 4 * n)
            case "read":
                reads.append(rank.producer.read(handle, 4 * n))
    reads += [rank.producer.read(handle, 4 * size_of(handle)) for handle in STORAGES]
    reads.append(rank.producer.call(Message.GET_RNG, words(0)))
    return reads


def compare(job: Callable[..., Any], seed: int, world: int, length: int) -> dict[str, int]:
    instructions = program(seed, length)
    results, counters = [], {}
    for placement in (list(range(world)), [0] * world):
        running = job(placement)
        results.append(together(running.ranks, lambda rank, i: perform(rank, i, world, instructions, seed)))
        if placement == [0] * world:
            counters = running.proxies[0].stats()["splice"]
        running.close()
    for index, (alone, spliced) in enumerate(zip(*results, strict=True)):
        for place, (a, b) in enumerate(zip(alone, spliced, strict=True)):
            assert a == b, f"seed {seed}, rank {index}, read {place} of {len(alone)}"
    assert counters["mismatches"] == 0
    return counters


@pytest.mark.parametrize("world", [2, 3])
def test_a_random_program_has_the_same_bits(job: Callable[..., Any], world: int) -> None:
    counters = compare(job, seed=world, world=world, length=200)
    assert counters["shared"] > 0
    assert counters["physical_bytes"] < counters["logical_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_programs_have_the_same_bits(job: Callable[..., Any], seed: int) -> None:
    compare(job, seed=1000 + seed, world=2 + seed % 3, length=300)
