"""Every reduction of every dtype, in random groups, has the bits of the fixed tree wherever its ranks live.

Real device proxies, several ranks on one and one rank on each, over random world sizes, sub-groups in any order, sizes
and numbers of tensors; compared with one another and with the tree computed here. What a dtype cannot do raises at
every member, on every placement.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy_runtime.device.client import Zygote
from tests.proxy_runtime.device.conftest import Job
from tests.proxy_runtime.device.producer import Producer, tensor_key
from tests.proxy_runtime.device.test_collective_messages import Kind
from tests.support.tree_gloo import tree_reduce

# For each world size: all on one device, some shared, in and out of order, each its own.
PLACEMENTS = {
    1: [[0]],
    2: [[0, 0], [0, 1]],
    3: [[0, 0, 0], [0, 0, 1], [0, 1, 2]],
    5: [[0] * 5, [0, 0, 0, 1, 1], [0, 1, 0, 2, 1], [0, 1, 2, 3, 4]],
    8: [[0] * 8, [0, 0, 0, 0, 1, 1, 1, 1]],
}
# By number of torch's ScalarType.
DTYPES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    9: torch.complex64,
    10: torch.complex128,
    11: torch.bool,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    27: torch.uint16,
    28: torch.uint32,
    29: torch.uint64,
}
_KINDS = dist.ReduceOp.RedOpType
REDUCTIONS = (_KINDS.SUM, _KINDS.AVG, _KINDS.PRODUCT, _KINDS.MIN, _KINDS.MAX, _KINDS.BAND, _KINDS.BOR, _KINDS.BXOR)
PIECE = 1 << 15  # bytes of one message
_ids = itertools.count(1000)

Jobs = Callable[[int], list[Job]]


@dataclass(frozen=True, slots=True)
class Case:
    """One collective of a group."""

    members: tuple[int, ...]
    kind: Kind
    op: int
    root: int
    dtype: int
    sizes: tuple[int, ...]  # elements of each tensor; a reduce-scatter has one, of as much for every member
    seed: int

    @property
    def tensors(self) -> list[int]:
        return [self.sizes[0] * len(self.members)] if self.kind is Kind.REDUCE_SCATTER else list(self.sizes)

    def inputs(self, group_rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + group_rank)
        return [_values(DTYPES[self.dtype], n, generator) for n in self.tensors]

    def expected(self) -> list[list[bytes]] | None:
        """What every member has afterwards; None: the dtype cannot be reduced so. Of nothing it can."""
        given_by = [self.inputs(i) for i in range(len(self.members))]
        if self.kind is Kind.REDUCE_SCATTER:  # a block is a tensor of its own: an element's place in it decides bits
            given_by = [list(whole[0].chunk(len(self.members))) if self.sizes[0] else whole for whole in given_by]
        try:
            whole = [
                tree_reduce(list(parts), REDUCTIONS[self.op]) if parts[0].numel() else parts[0]
                for parts in zip(*given_by, strict=True)
            ]
        except (RuntimeError, TypeError):
            return None
        if self.kind is Kind.ALL_REDUCE:
            return [[_bytes(t) for t in whole] for _ in self.members]
        if self.kind is Kind.REDUCE:
            return [[_bytes(t) for t in (whole if i == self.root else own)] for i, own in enumerate(given_by)]
        return [[_bytes(whole[i if self.sizes[0] else 0])] for i in range(len(self.members))]


def _values(dtype: torch.dtype, n: int, generator: torch.Generator) -> torch.Tensor:
    """Magnitudes far apart, so that another order gives other bits."""
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.randn(n, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64)
        return (wide * 10.0 ** torch.randint(-3, 4, (n,), generator=generator)).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, (n,), generator=generator).bool()
    return torch.randint(-100 if dtype.is_signed else 0, 100, (n,), generator=generator).to(dtype)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Case]:
    world = draw(st.sampled_from(list(PLACEMENTS)))
    members = draw(st.permutations(range(world)))[: draw(st.integers(1, world))]
    kind = draw(st.sampled_from([Kind.ALL_REDUCE, Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER]))
    # Small ones, ones at the border of what is sent whole, and ones that owners reduce in chunks.
    elements = st.one_of(st.integers(0, 70), st.sampled_from([2_047, 8_192, 16_385, 30_001]))
    # The engine takes one tensor for several of these kinds; for an all-reduce they may be many.
    many = 4 if kind is Kind.ALL_REDUCE else 1
    sizes = draw(st.lists(elements, min_size=1, max_size=many))
    dtype, op = draw(st.sampled_from(list(DTYPES))), draw(st.integers(0, len(REDUCTIONS) - 1))
    root = draw(st.integers(0, len(members) - 1))
    return world, Case(tuple(members), kind, op, root, dtype, tuple(sizes), draw(st.integers(0, 10_000)))


@pytest.fixture(scope="module")
def jobs(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """The jobs of a world size, one for each placement, started when they are asked for."""
    started: dict[int, list[Job]] = {}

    def of(world: int) -> list[Job]:
        if world not in started:
            folder: Path = tmp_path_factory.mktemp("jobs")
            started[world] = [Job(zygote, folder, placement).start() for placement in PLACEMENTS[world]]
        return started[world]

    yield of
    for job in itertools.chain.from_iterable(started.values()):
        job.close()


def _give(rank: Producer, handle: int, data: bytes) -> None:
    rank.alloc(handle, max(1, len(data)))
    for at in range(0, len(data), PIECE):
        rank.write(handle, data[at : at + PIECE], offset=at)


def _issue(rank: Producer, case: Case, comm: int, group_rank: int, first: int) -> int:
    """Returns the handle of the first result."""
    rank.communicator(comm, group_rank, case.members)
    given_here = case.inputs(group_rank)
    for i, tensor in enumerate(given_here):
        _give(rank, first + i, _bytes(tensor))
    refs = [(tensor_key([n], dtype=case.dtype), first + i) for i, n in enumerate(case.tensors)]
    if case.kind is not Kind.REDUCE_SCATTER:
        rank.collective(comm, case.kind, refs, refs, op=case.op, root=case.root)
        return first
    _give(rank, first + 1, bytes(case.sizes[0] * given_here[0].element_size()))
    output = [(tensor_key([case.sizes[0]], dtype=case.dtype), first + 1)]
    rank.collective(comm, case.kind, refs, output, op=case.op)
    return first + 1


def run(job: Job, case: Case) -> list[list[bytes]] | None:
    """What every member has afterwards; None: all of them were told that it cannot be done."""
    comm, first = next(_ids), 100 * next(_ids)
    ranks = [job.ranks[member] for member in case.members]
    order = list(enumerate(ranks))
    random.Random(case.seed).shuffle(order)  # nobody waits for its turn
    results = {i: _issue(rank, case, comm, i, first) for i, rank in order}
    errors, made = [], []
    size = torch.empty(0, dtype=DTYPES[case.dtype]).element_size()
    for i, rank in enumerate(ranks):
        rank.sync()
        errors.append(rank.take_error())
        made.append([])
        for k, n in enumerate(case.sizes):
            total = n * size
            pieces = [rank.read(results[i] + k, min(PIECE, total - at), offset=at) for at in range(0, total, PIECE)]
            made[-1].append(b"".join(pieces))
        for handle in range(first, first + len(case.tensors) + 1):
            rank.free(handle)
    if any(errors):
        # Who has no part of the result need not hear of it.
        has_result = [i for i in range(len(ranks)) if case.kind is not Kind.REDUCE or i == case.root]
        assert all(errors[i] for i in has_result), errors
        return None
    return made


def check(jobs: Jobs, world: int, case: Case) -> None:
    expected = case.expected()
    for job in jobs(world):
        assert run(job, case) == expected, (job.placement, case)


@settings(max_examples=60)
@given(cases())
def test_a_reduction_has_the_bits_of_the_tree_on_every_placement(jobs: Jobs, drawn: tuple[int, Case]) -> None:
    check(jobs, *drawn)


@pytest.mark.slow
@settings(max_examples=1500)
@given(cases())
def test_many_reductions_have_the_bits_of_the_tree(jobs: Jobs, drawn: tuple[int, Case]) -> None:
    check(jobs, *drawn)


@pytest.mark.parametrize("op", range(len(REDUCTIONS)), ids=lambda op: str(REDUCTIONS[op]))
def test_every_dtype(jobs: Jobs, op: int) -> None:
    """None is left out by chance."""
    for dtype in DTYPES:
        for kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER):
            check(jobs, 3, Case((2, 0, 1), kind, op, 1, dtype, (33,), dtype))
