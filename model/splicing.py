"""Which ranks of a job may share a device, and whether they fit it. Pure.

Nothing here goes by what ranks are called: who talks to whom is read from the communicators that a cut has found, and
who holds the same parameters from the bytes of their device memory. That is not all: fully sharded ranks that are cut
within a step hold whole layers, which they have just gathered. They give themselves away by summing gradients into
shards (reduce-scatter). Replicas that are cut while some have updated their weights and others not have nothing in
common: they are taken for shards, which is never wrong, but shares less, and is counted as more memory.

- *Replicas of one shard share a device first*: they hold the same parameters and the same optimizer state. Those on one
  device are neighbours in their communicator, so that they are whole subtrees of its reductions.
- *Shards* (fully sharded, tensor- or pipeline-parallel ranks) share one only where a device has to take more ranks than
  there are replicas. Then whole sets of replicas are put together, in the order of their first ranks. Their memory
  adds up.
- *No cycle of waiting can arise*, whoever shares with whom: a device goes on with any of its ranks that is not waiting,
  so that a rank waits only for ranks that wait themselves, as it would on a device of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations

from model.errors import ModelError
from model.manifest import RankState
from model.shape import Shape
from model.units import counted, size_words

ALIKE = 4
"""Two ranks are replicas where one in so many of the chunks by which they are compared is in both. At the end of a step
most of what replicas hold is parameters and optimizer state; different shards have only constants in common."""


@dataclass(frozen=True, slots=True)
class Parallelism(Shape):
    """How a job's ranks hang together, as a cut has found it.

    Attributes:
        replicas: sets of ranks that hold the same shard, all of one size, each in the order of its communicator; the
            sets in the order of their first ranks.
        peaks: per rank, the most bytes of device memory that it has had.
        gradients: per rank, bytes of gradients in a step; 0 where not known: then replicas are counted in full.
    """

    replicas: tuple[tuple[int, ...], ...]
    peaks: tuple[int, ...]
    gradients: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.peaks)

    @property
    def copies(self) -> int:
        """How many ranks hold each shard."""
        return len(self.replicas[0])

    def needed(self, ranks: Iterable[int]) -> int:
        """Bytes of device memory that ranks need which share one device, at most.

        Of replicas one holds parameters and optimizer state, and one at a time has activations; partial sums of the
        others' gradients are kept on each level of the tree. Shards add up.
        """
        mine = set(ranks)
        total = 0
        for replicas in self.replicas:
            here = [rank for rank in replicas if rank in mine]
            if not here:
                continue
            peak, gradients = max(self.peaks[rank] for rank in here), max(self.gradients[rank] for rank in here)
            if gradients:
                total += peak + (len(here) - 1).bit_length() * gradients
            else:
                total += sum(self.peaks[rank] for rank in here)
        return total


def parallelism(states: Iterable[RankState]) -> Parallelism:
    """What a cut tells, given all ranks of the job."""
    ranks = sorted(states, key=lambda state: state.rank)
    return Parallelism(
        _replicas(ranks),
        tuple(max(state.peak_bytes, state.device_bytes) for state in ranks),
        tuple(state.gradient_bytes for state in ranks),
    )


def measured_again(found: Parallelism, states: Iterable[RankState]) -> Parallelism:
    """The same, with the memory that ranks have had by another cut, which need not say what they hold."""
    now = parallelism(states)
    return replace(found, peaks=now.peaks, gradients=now.gradients) if now.world_size == found.world_size else found


def widths(world_size: int, least: int = 1, most: int = 0) -> tuple[int, ...]:
    """The widths at which every device has as many ranks, ascending."""
    return tuple(width for width in range(least, (most or world_size) + 1) if world_size % width == 0)


def placed(found: Parallelism, width: int) -> tuple[int, ...]:
    """For each rank the index of its device, on `width` devices.

    Raises:
        ModelError: ``model.width``: that many devices cannot have as many ranks each, or would tear replicas apart.
    """
    world, copies = found.world_size, found.copies
    check_width(world, width)
    each = world // width
    shares: list[tuple[int, ...]]
    if copies % each == 0:
        shares = [ranks[first : first + each] for ranks in found.replicas for first in range(0, copies, each)]
    elif each % copies == 0:
        count = each // copies
        sets = found.replicas
        shares = [
            tuple(rank for ranks in sets[first : first + count] for rank in ranks)
            for first in range(0, len(sets), count)
        ]
    else:
        raise ModelError(
            f"On {counted(width, 'device')} {each} ranks would share one, which is neither a part nor a multiple of "
            f"the {copies} that hold the same parameters.",
            code="model.width",
        )
    device_of_rank = [0] * world
    for index, ranks in enumerate(sorted(shares, key=min)):
        for rank in ranks:
            device_of_rank[rank] = index
    return tuple(device_of_rank)


def check_width(world_size: int, width: int) -> None:
    """Checks that a job of so many ranks can have a width at all.

    Raises:
        ModelError: ``model.width``.
    """
    if width < 1:
        raise ModelError(f"A job cannot run on {counted(width, 'device')}.", code="model.width")
    if width > world_size:
        raise ModelError(
            f"A job of {counted(world_size, 'rank')} cannot use {width} devices: it has at most one for each rank.",
            code="model.width",
        )
    if world_size % width:
        possible = ", ".join(map(str, widths(world_size)))
        raise ModelError(
            f"{world_size} ranks cannot be shared out evenly over {counted(width, 'device')}; possible are {possible}.",
            code="model.width",
        )


def check_fit(found: Parallelism, device_of_rank: Sequence[int], memory_bytes: int) -> None:
    """Checks that the ranks of every device fit it; 0 bytes of memory: nobody knows, and nothing is refused.

    Raises:
        ModelError: ``model.fit``, with the sizes, and the fewest devices on which they fit.
    """
    ranks, needed = _fullest(found, device_of_rank)
    if memory_bytes and needed > memory_bytes:
        raise ModelError(
            f"It would not fit: {counted(ranks, 'rank')} on one device need {size_words(needed)}, by what they have "
            f"used so far, and a device has {size_words(memory_bytes)}.",
            code="model.fit",
            remedy=_roomy(found, memory_bytes),
        )


def _fullest(found: Parallelism, device_of_rank: Sequence[int]) -> tuple[int, int]:
    """How many ranks the device has that needs most, and how many bytes that is."""
    ranks_on: dict[int, list[int]] = {}
    for rank, device in enumerate(device_of_rank):
        ranks_on.setdefault(device, []).append(rank)
    return max(((len(ranks), found.needed(ranks)) for ranks in ranks_on.values()), key=lambda device: device[1])


def _roomy(found: Parallelism, memory_bytes: int) -> str:
    for width in widths(found.world_size):
        with suppress(ModelError):  # that width would tear replicas apart
            if _fullest(found, placed(found, width))[1] <= memory_bytes:
                return f"On {counted(width, 'device')} it would."
    return ""


def _replicas(ranks: Sequence[RankState]) -> tuple[tuple[int, ...], ...]:
    """Of the communicators that could join replicas, those whose members are most alike in what they hold."""
    alone = tuple((state.rank,) for state in ranks)
    known = {state.rank: frozenset(state.sketch) for state in ranks}
    communicators = [communicator for state in ranks for communicator in state.communicators]
    sharded = {frozenset(each.members) for each in communicators if each.scatters}
    groups = {
        members
        for members in {each.members for each in communicators}
        if all(len(shards.intersection(members)) < 2 for shards in sharded)
    }
    # Larger groups first: whoever is alike in the whole world is so in each part of it.
    for size in sorted({len(members) for members in groups if len(members) > 1}, reverse=True):
        alike = sorted(members for members in groups if len(members) == size and _alike(members, known))
        if sorted(rank for members in alike for rank in members) == [state.rank for state in ranks]:
            return tuple(sorted(alike, key=min))
    return alone


def _alike(members: Sequence[int], sketches: dict[int, frozenset[str]]) -> bool:
    """Whether any two members have a good part of their device memory in common."""
    # In a large group the first with all others says as much, in less time.
    pairs = combinations(members, 2) if len(members) <= 64 else ((members[0], other) for other in members[1:])
    return all(ALIKE * len(sketches[a] & sketches[b]) >= min(len(sketches[a]), len(sketches[b])) > 0 for a, b in pairs)
