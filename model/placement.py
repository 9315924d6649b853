"""Placement v1: on which device each rank of a job is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from model.errors import Fault, ModelError
from model.ids import DeviceId, Epoch, NodeId
from model.job_spec import JobSpec
from model.shape import Shape
from model.units import counted


@dataclass(frozen=True, slots=True)
class Placement(Shape):
    """A job's ranks on devices, for one epoch.

    Devices are listed in the order of their first ranks. Which ranks share one is the business of `model.splicing`.

    Attributes:
        epoch: the placement generation, from 1.
        devices: the devices used; their number is the width.
        device_of_rank: for each logical rank, an index into `devices`.
        ranks_per_group: logical ranks that share a process tree, and so a node (`devices_per_rank` of the spec).

    Raises:
        ModelError: ``model.placement``, with all that is wrong.
    """

    epoch: Epoch
    devices: tuple[DeviceId, ...]
    device_of_rank: tuple[int, ...]
    ranks_per_group: int = 1

    def __post_init__(self) -> None:
        faults = tuple(self._faults())
        if faults:
            raise ModelError.of_faults("Placement", faults, code="model.placement")

    @property
    def width(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def world_size(self) -> int:
        """Number of logical ranks."""
        return len(self.device_of_rank)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The nodes used, in the order of their first rank."""
        return tuple(dict.fromkeys(device.node for device in self.devices))

    def device(self, rank: int) -> DeviceId:
        """The device of a rank."""
        return self.devices[self.device_of_rank[rank]]

    def ranks_on(self, device: DeviceId) -> tuple[int, ...]:
        """The ranks on a device; more than one are spliced. Empty for a device that is not used."""
        return tuple(rank for rank, index in enumerate(self.device_of_rank) if self.devices[index] == device)

    def ranks_at(self, node: NodeId) -> tuple[int, ...]:
        """The ranks on a node."""
        return tuple(rank for rank in range(self.world_size) if self.device(rank).node == node)

    def _faults(self) -> Iterator[Fault]:
        if self.epoch < 1:
            yield Fault("epoch", "is 0, which is before the first placement", "Use 1 or more.")
        if not self.devices or not self.device_of_rank:
            yield Fault("devices", "and `device_of_rank` must not be empty", "Place every rank on a device.")
            return
        yield from self._device_faults()
        bad = next((rank for rank, index in enumerate(self.device_of_rank) if not 0 <= index < self.width), None)
        if bad is not None:
            yield Fault(
                f"device_of_rank[{bad}]",
                f"is {self.device_of_rank[bad]}, but the placement has {counted(self.width, 'device')}",
                "Use an index into `devices`.",
            )
            return
        unused = sorted(set(range(self.width)) - set(self.device_of_rank))
        if unused:
            yield Fault(f"devices[{unused[0]}]", "has no rank", "Leave out devices that are not used.")
        first = list(dict.fromkeys(self.device_of_rank))
        if any(after < before for before, after in pairwise(first)):
            yield Fault(
                "device_of_rank",
                "is not in the order of the devices' first ranks",
                "List devices in the order of the first rank on each.",
            )
        yield from self._group_faults()

    def _device_faults(self) -> Iterator[Fault]:
        seen: set[DeviceId] = set()
        incarnations: dict[str, int] = {}
        for index, device in enumerate(self.devices):
            where = f"devices[{index}]"
            if device in seen:
                yield Fault(where, f"names {device}, which is listed twice", "List each device once.")
            seen.add(device)
            if incarnations.setdefault(device.node.name, device.node.incarnation) != device.node.incarnation:
                yield Fault(where, f"names another incarnation of node {device.node.name}", "Only one can be alive.")
        for index, device in enumerate(self.devices):
            parent = device.parent
            while parent is not None:
                if parent in seen:
                    yield Fault(
                        f"devices[{index}]", f"names {device}, a part of {parent}, which is used as a whole", "Use one."
                    )
                parent = parent.parent

    def _group_faults(self) -> Iterator[Fault]:
        size = self.ranks_per_group
        if size < 1 or self.world_size % size:
            yield Fault(
                "ranks_per_group",
                f"is {size}, which does not divide the {self.world_size} ranks",
                "Use `devices_per_rank` of the job.",
            )
            return
        for first in range(0, self.world_size, size):
            nodes = dict.fromkeys(str(self.device(rank).node) for rank in range(first, first + size))
            if len(nodes) > 1:
                yield Fault(
                    "device_of_rank",
                    f"puts ranks {first} to {first + size - 1}, which are one process tree, on {' and '.join(nodes)}",
                    "Keep a process tree on one node.",
                )


def check_placement(spec: JobSpec, placement: Placement) -> None:
    """Checks that a placement is one for this job.

    Raises:
        ModelError: ``model.placement``, with all that does not fit.
    """
    faults: list[Fault] = []
    if placement.world_size != spec.world_size:
        faults.append(
            Fault(
                "device_of_rank",
                f"places {placement.world_size} ranks, but the job has {spec.world_size}",
                "Place every rank, once.",
            )
        )
    if placement.ranks_per_group != spec.devices_per_rank:
        faults.append(
            Fault(
                "ranks_per_group",
                f"is {placement.ranks_per_group}, but `devices_per_rank` of the job is {spec.devices_per_rank}",
                "Use the value of the job.",
            )
        )
    if not spec.min_width <= placement.width <= spec.widest:
        faults.append(
            Fault(
                "devices",
                f"has {counted(placement.width, 'device')}, but the job runs on {spec.min_width} to {spec.widest}",
                "Change the placement, or the widths of the job.",
            )
        )
    if faults:
        raise ModelError.of_faults("Placement", faults, code="model.placement")
