"""Random programs of collectives over ranks, and what they must compute: a direct, sequential evaluation.

A rank's state is a number that every input is derived from and every result is folded into, so that one wrong bit
anywhere changes everything after it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from tests.support.tree import Array, tree_reduce


class Kind(IntEnum):
    """CollectiveKind of channel/messages.hpp."""

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


SUM, AVG, PRODUCT, MIN, MAX, AND, OR, XOR = range(8)
DTYPES = {0: np.uint8, 3: np.int32, 4: np.int64, 6: np.float32, 7: np.float64, 11: np.bool_}  # by ScalarType
FLOATS = (6, 7)
Spec = tuple[int, int]  # dtype code, elements


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, seen by all its members. A send and its receive are one call.

    `specs[i]` are the input segments of group rank i.
    """

    index: int
    comm: int
    members: tuple[int, ...]
    kind: Kind
    op: int
    root: int
    specs: tuple[tuple[Spec, ...], ...]

    @property
    def participants(self) -> tuple[int, ...]:
        """Global ranks that issue something for it."""
        if self.kind is Kind.SEND:
            return self.members[self.op], self.members[self.root]  # a pair: `op` holds the sender's group rank
        return self.members

    def issued(self, rank: int) -> tuple[Kind, int, int]:
        """Kind, reduction and root as this participant passes them."""
        if self.kind is not Kind.SEND:
            return self.kind, self.op, self.root
        sender = rank == self.members[self.op]
        return (Kind.SEND, SUM, self.root) if sender else (Kind.RECV, SUM, self.op)


@dataclass(frozen=True, slots=True)
class Touch:
    """The rank needs all results that it waits for."""

    rank: int


Step = Call | Touch


@dataclass(frozen=True, slots=True)
class Program:
    """Steps in an order that is legal for all ranks: each executes those that concern it."""

    ranks: int
    comms: dict[int, tuple[int, ...]]
    steps: tuple[Step, ...]

    def of(self, rank: int) -> list[Step]:
        """The steps of one rank."""
        return [s for s in self.steps if (s.rank == rank if isinstance(s, Touch) else rank in s.participants)]


def inputs(call: Call, rank: int, state: int) -> list[Array]:
    """The arrays that `rank` gives, one for each segment."""
    values = np.random.default_rng([call.index, rank, state])
    return [_values(values, code, count) for code, count in call.specs[call.members.index(rank)]]


def _values(source: np.random.Generator, code: int, count: int) -> Array:
    if code in FLOATS:
        # Magnitudes far apart: another order of additions gives other bits.
        return (source.standard_normal(count) * 10.0 ** source.integers(-3, 4, count)).astype(DTYPES[code])
    if code == 11:
        return source.integers(0, 2, count).astype(np.bool_)
    return source.integers(0, 256, count).astype(DTYPES[code]) - DTYPES[code](100 if code != 0 else 0)


def pack(arrays: Sequence[Array]) -> bytes:
    """Segments, each padded to a multiple of 64 bytes (collectives.hpp)."""
    return b"".join(a.tobytes() + b"\0" * (-a.nbytes % 64) for a in arrays)


def fold(state: int, result: list[bytes]) -> int:
    """The state after a result has been taken in."""
    digest = hashlib.blake2b(state.to_bytes(8, "little"), digest_size=8)
    for block in result:
        digest.update(len(block).to_bytes(8, "little") + block)
    return int.from_bytes(digest.digest(), "little")


def results(call: Call, given: dict[int, list[Array]]) -> dict[int, list[bytes]]:
    """What every participant gets, computed directly: blocks of packed bytes by global rank."""
    members = call.members
    world = len(members)
    nothing: dict[int, list[bytes]] = {rank: [] for rank in call.participants}

    def reduced(segment: int) -> Array:
        value = tree_reduce([given[rank][segment] for rank in members], call.op)
        return np.divide(value, world, dtype=value.dtype) if call.op == AVG else value

    match call.kind:
        case Kind.ALL_REDUCE:
            whole = [pack([reduced(i) for i in range(len(call.specs[0]))])]
            return dict.fromkeys(members, whole)
        case Kind.REDUCE:
            return nothing | {members[call.root]: [pack([reduced(i) for i in range(len(call.specs[0]))])]}
        case Kind.REDUCE_SCATTER:
            return {rank: [pack([reduced(i)])] for i, rank in enumerate(members)}
        case Kind.BROADCAST:
            sent = [pack(given[members[call.root]])]
            return {rank: [] if i == call.root else sent for i, rank in enumerate(members)}
        case Kind.ALL_GATHER:
            every = [pack(given[rank]) for rank in members]
            return dict.fromkeys(members, every)
        case Kind.GATHER:
            return nothing | {members[call.root]: [pack(given[rank]) for rank in members]}
        case Kind.SCATTER:
            return {rank: [pack([given[members[call.root]][i]])] for i, rank in enumerate(members)}
        case Kind.ALL_TO_ALL:
            return {rank: [pack([given[other][i]]) for other in members] for i, rank in enumerate(members)}
        case Kind.SEND:
            sender, receiver = call.participants
            return {sender: [], receiver: [pack(given[sender])]}
        case _:
            return nothing


@dataclass(frozen=True, slots=True)
class Truth:
    """What a program computes: final state per rank, and the result of every call at every participant."""

    states: list[int]
    results: dict[tuple[int, int], list[bytes]]  # (call index, rank) -> blocks


def evaluate(program: Program) -> Truth:
    """Runs the program sequentially, without proxies."""
    states = [rank + 1 for rank in range(program.ranks)]
    waiting: list[list[list[bytes]]] = [[] for _ in range(program.ranks)]
    known: dict[tuple[int, int], list[bytes]] = {}

    def touch(rank: int) -> None:
        for result in waiting[rank]:
            states[rank] = fold(states[rank], result)
        waiting[rank].clear()

    for step in program.steps:
        if isinstance(step, Touch):
            touch(step.rank)
            continue
        given = {rank: inputs(step, rank, states[rank]) for rank in step.participants}
        for rank, result in results(step, given).items():
            known[step.index, rank] = result
            waiting[rank].append(result)
    for rank in range(program.ranks):
        touch(rank)
    return Truth(states, known)


def random_program(source: random.Random, ranks: int, length: int) -> Program:
    """A legal program of `length` calls and touches over all ranks and some sub-groups."""
    comms = {7: tuple(range(ranks))}
    for comm in range(source.randint(0, 3)):
        members = source.sample(range(ranks), source.randint(1, ranks))
        comms[100 + comm] = tuple(members)  # in any order: group ranks are not global ranks
    steps: list[Step] = []
    for index in range(length):
        if source.random() < 0.35:
            steps.append(Touch(source.randrange(ranks)))
        else:
            comm = source.choice(list(comms))
            steps.append(_random_call(source, index, comm, comms[comm]))
    return Program(ranks, comms, tuple(steps))


def _random_call(source: random.Random, index: int, comm: int, members: tuple[int, ...]) -> Call:
    world = len(members)
    kinds = [kind for kind in Kind if kind is not Kind.RECV and (kind is not Kind.SEND or world > 1)]
    # All-reduces are what jobs are made of.
    kind = Kind.ALL_REDUCE if source.random() < 0.3 else source.choice(kinds)
    root = source.randrange(world)
    op = SUM

    def count() -> int:
        return source.choice([0, 1, 3, 17, 64, 300])

    specs: list[tuple[Spec, ...]]
    if kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER):
        op = source.choice([SUM, SUM, SUM, AVG, PRODUCT, MIN, MAX, AND, OR, XOR])
        codes = FLOATS if op == AVG else (0, 3, 4, 11) if op >= AND else tuple(DTYPES)
        if kind is Kind.REDUCE_SCATTER:
            code = source.choice(codes)
            same: tuple[Spec, ...] = tuple((code, count()) for _ in members)
        else:
            same = tuple((source.choice(codes), count()) for _ in range(source.randint(1, 3)))
            if source.random() < 0.25:  # large enough to be reduced in chunks by owners
                same = (*same, (source.choice(codes), source.randint(65_537, 80_000)))
        specs = [same] * world
    elif kind is Kind.BARRIER:
        specs = [()] * world
    else:
        code = source.choice(list(DTYPES))
        if kind in (Kind.SCATTER, Kind.ALL_TO_ALL):
            specs = [tuple((code, count()) for _ in members) for _ in members]
        else:
            specs = [((code, count()),) for _ in members]
        if kind is Kind.SEND:
            op = source.choice([i for i in range(world) if i != root])
            specs = [spec if i == op else () for i, spec in enumerate(specs)]
        elif kind in (Kind.BROADCAST, Kind.SCATTER):
            specs = [spec if i == root else () for i, spec in enumerate(specs)]
    return Call(index, comm, members, kind, op, root, tuple(specs))
