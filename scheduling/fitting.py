"""Puts a gang on devices: contiguous ranks, process trees whole on one node, one node before few nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from model.ids import DeviceId, NodeId

Free = Mapping[NodeId, Sequence[DeviceId]]
"""Devices that may be used, by node."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Devices in the order of their ranks, and the device of each rank."""

    devices: tuple[DeviceId, ...]
    device_of_rank: tuple[int, ...]

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The nodes used, in the order of their first rank."""
        return tuple(dict.fromkeys(device.node for device in self.devices))


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
        placed = self.device_of_rank
        first_of: list[int] = []  # for each device, the first device of its run
        for start in range(0, self.ranks, self.group):
            low, high = placed[start], placed[start + self.group - 1]
            first = first_of[low] if low < len(first_of) else low
            first_of += [first] * (high + 1 - len(first_of))
        return tuple(len(list(run)) for _, run in groupby(first_of))


def fit(gang: Gang, free: Free) -> Fit | None:
    """Devices for a gang, or None.

    On one node if possible, the one where the fewest devices stay free; else on the fewest nodes, the last of them the
    tightest. Ties go by name.
    """
    nodes = sorted(((len(devices), node) for node, devices in free.items() if devices), key=lambda item: item)
    for count, node in nodes:
        if count >= gang.width:
            return Fit(tuple(free[node][: gang.width]), gang.device_of_rank)
    if sum(count for count, _ in nodes) < gang.width:
        return None
    runs = list(gang.runs)
    chosen: list[DeviceId] = []
    roomy = sorted(nodes, key=lambda item: (-item[0], item[1]))
    while runs:
        rest = sum(runs)
        last = min(((count, node) for count, node in roomy if count >= rest), default=None)
        if last is None and not roomy:
            return None
        count, node = last or roomy[0]
        taken = 0
        while runs and taken + runs[0] <= count:
            taken += runs.pop(0)
        chosen += free[node][:taken]
        roomy.remove((count, node))
    return Fit(tuple(chosen), gang.device_of_rank)
