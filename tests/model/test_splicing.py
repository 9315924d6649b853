"""Which ranks share a device: DDP, fully sharded, hybrid, tensor and pipeline parallel, and what fits."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import ModelError
from model.ids import Step
from model.manifest import CommunicatorState, RankState
from model.splicing import Parallelism, check_fit, parallelism, placed, widths

MIB = 1 << 20


def job(
    world: int, *meshes: list[tuple[int, ...]], shard_of=lambda rank: 0, scatters=(), peak=MIB, gradients=0
) -> Parallelism:
    """A job whose ranks are in these groups; ranks of one shard hold the same. `scatters`: they get parts of sums."""
    states = []
    for rank in range(world):
        mine = [members for groups in meshes for members in groups if rank in members]
        states.append(
            RankState(
                rank=rank,
                step=Step(3),
                communicators=tuple(
                    CommunicatorState(
                        name=str(index), members=members, contributed=1, completed=1, scatters=members in scatters
                    )
                    for index, members in enumerate(mine)
                ),
                peak_bytes=peak,
                gradient_bytes=gradients,
                sketch=(*(f"{shard_of(rank)}-{n}" for n in range(6)), f"activation-{rank}", "constant"),
            )
        )
    return parallelism(states)


WORLD = [(0, 1, 2, 3)]
ROWS, COLUMNS = [(0, 1), (2, 3)], [(0, 2), (1, 3)]


def test_replicas_of_data_parallelism_are_neighbours() -> None:
    ddp = job(4, WORLD)
    assert ddp.replicas == ((0, 1, 2, 3),) and ddp.copies == 4
    assert placed(ddp, 2) == (0, 0, 1, 1)
    assert placed(ddp, 1) == (0, 0, 0, 0)
    assert placed(ddp, 4) == (0, 1, 2, 3)


def test_neighbours_are_those_of_the_communicator_not_of_the_job() -> None:
    assert placed(job(4, [(0, 2, 1, 3)]), 2) == (0, 1, 0, 1)


def test_fully_sharded_ranks_are_joined_in_order() -> None:
    fsdp = job(4, WORLD, shard_of=lambda rank: rank)
    assert fsdp.copies == 1
    assert [placed(fsdp, width) for width in (4, 2, 1)] == [(0, 1, 2, 3), (0, 0, 1, 1), (0, 0, 0, 0)]


def test_shards_that_hold_gathered_layers_when_they_are_cut_are_no_replicas() -> None:
    fsdp = job(4, WORLD, scatters=WORLD)
    assert fsdp.copies == 1 and fsdp.needed(range(4)) == 4 * MIB
    tensor_x_fsdp = job(4, WORLD, ROWS, COLUMNS, shard_of=lambda rank: rank % 2, scatters=COLUMNS)
    assert tensor_x_fsdp.copies == 1 and placed(tensor_x_fsdp, 2) == (0, 0, 1, 1)
    hybrid = job(4, WORLD, ROWS, COLUMNS, scatters=ROWS)
    assert hybrid.replicas == ((0, 2), (1, 3)) and placed(hybrid, 2) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("shard_of", "two"),
    [(lambda rank: rank % 2, (0, 1, 0, 1)), (lambda rank: rank // 2, (0, 0, 1, 1))],
    ids=["replicas outside", "replicas inside"],
)
def test_hybrid_sharding_splices_over_the_dimension_whose_members_hold_the_same(shard_of, two) -> None:
    hybrid = job(4, WORLD, ROWS, COLUMNS, shard_of=shard_of)
    assert hybrid.copies == 2
    assert placed(hybrid, 2) == two
    assert placed(hybrid, 1) == (0, 0, 0, 0)


def test_tensor_parallel_ranks_stay_apart_while_there_are_replicas_to_join() -> None:
    """Data parallel over the columns, tensor parallel in the rows; then pipelines whose stages only send."""
    mixed = job(8, [(0, 1), (2, 3), (4, 5), (6, 7)], [(0, 2, 4, 6), (1, 3, 5, 7)], shard_of=lambda rank: rank % 2)
    assert placed(mixed, 4) == (0, 1, 0, 1, 2, 3, 2, 3)
    assert placed(mixed, 2) == (0, 1, 0, 1, 0, 1, 0, 1)
    pipeline = job(4, [(0, 1), (1, 2), (2, 3)], shard_of=lambda rank: rank)
    assert placed(pipeline, 2) == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (0, "cannot run on 0"),
        (-2, "cannot run on -2"),
        (5, "A job of 4 ranks cannot use 5"),
        (3, "possible are 1, 2, 4"),
    ],
)
def test_widths_that_are_none(width: int, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        placed(job(4, WORLD), width)


def test_a_width_that_would_tear_replicas_apart() -> None:
    hybrid = job(6, [(0, 3), (1, 4), (2, 5)], shard_of=lambda rank: rank % 3)
    assert placed(hybrid, 3) == (0, 1, 2, 0, 1, 2)
    with pytest.raises(ModelError, match="3 ranks would share one, which is neither a part nor a multiple of the 2"):
        placed(hybrid, 2)


def test_memory_by_the_formula() -> None:
    ddp = job(8, [tuple(range(8))], peak=100 * MIB, gradients=10 * MIB)
    assert [ddp.needed(range(n)) // MIB for n in (1, 2, 3, 4, 8)] == [100, 110, 120, 120, 130]
    unknown = job(4, WORLD, peak=100 * MIB)
    assert unknown.needed(range(4)) == 400 * MIB, "where nobody knows their gradients replicas are counted in full"
    fsdp = job(4, WORLD, shard_of=lambda rank: rank, peak=100 * MIB, gradients=10 * MIB)
    assert fsdp.needed((0, 1)) == 200 * MIB, "of shards only one gradient each is there, in its peak"


def test_what_does_not_fit_is_told_with_its_sizes() -> None:
    fsdp = job(4, WORLD, shard_of=lambda rank: rank, peak=100 * MIB)
    check_fit(fsdp, placed(fsdp, 2), 200 * MIB)
    check_fit(fsdp, placed(fsdp, 1), 0)
    with pytest.raises(
        ModelError, match=r"4 ranks on one device need 400.0 MiB.*has 399.0 MiB\. On 2 devices it would\.$"
    ):
        check_fit(fsdp, placed(fsdp, 1), 399 * MIB)
    with pytest.raises(ModelError, match=r"a device has 99.0 MiB\.$"):  # on no number of devices
        check_fit(fsdp, placed(fsdp, 2), 99 * MIB)


@given(st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_every_rank_is_placed_and_replicas_are_together(copies: int, shards: int, outside: bool) -> None:
    world = copies * shards

    def shard(rank: int) -> int:
        return rank % shards if outside else rank // copies

    together = [tuple(rank for rank in range(world) if shard(rank) == index) for index in range(shards)]
    apart = [tuple(ranks[n] for ranks in together) for n in range(copies)]
    found = job(world, [tuple(range(world))], together, apart, shard_of=shard)
    assert found.copies == copies
    for width in widths(world):
        each = world // width
        try:
            device_of_rank = placed(found, width)
        except ModelError:
            assert copies % each and each % copies
            continue
        assert list(dict.fromkeys(device_of_rank)) == list(range(width))
        groups = [tuple(r for r in range(world) if device_of_rank[r] == device) for device in range(width)]
        assert {len(ranks) for ranks in groups} == {each}
        for ranks, replicas in itertools.product(groups, together):
            here = set(ranks) & set(replicas)
            assert len(here) in (0, min(each, copies)), "as many replicas of a shard as can be"
