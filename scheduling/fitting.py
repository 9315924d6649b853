"""A gang: contiguous ranks, process trees whole on one node."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Gang:
    """What must be placed at once: `ranks` over `width` devices, `group` neighbouring ranks on one node."""

    ranks: int
    width: int
    group: int = 1

    @property
    def device_of_rank(self) -> tuple[int, ...]:
        """Contiguous ranks, as even as possible."""
        return tuple(rank * self.width // self.ranks for rank in range(self.ranks))

    @property
    def runs(self) -> tuple[int, ...]:
        """Numbers of neighbouring devices that must be on one node: those that a process tree links."""
        return _runs(self)


@lru_cache(4096)  # thousands of jobs are of few shapes, and each is asked for on every tick
def _runs(gang: Gang) -> tuple[int, ...]:
    placed = gang.device_of_rank
    first_of: list[int] = []  # for each device, the first device of its run
    for start in range(0, gang.ranks, gang.group):
        low, high = placed[start], placed[start + gang.group - 1]
        first = first_of[low] if low < len(first_of) else low
        first_of += [first] * (high + 1 - len(first_of))
    return tuple(len(list(run)) for _, run in groupby(first_of))
