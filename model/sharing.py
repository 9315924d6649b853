"""What is told of ranks of a job that share a device."""

from __future__ import annotations

from dataclasses import dataclass

from model.ids import Epoch, NodeId
from model.shape import Shape


@dataclass(frozen=True, slots=True)
class SharingIncidents(Shape):
    """What went another way than it should where ranks of a job share a device. None of it changes a number.

    Attributes:
        time_limits: waits of a rank for the others of its device that a time limit has ended.
        mismatches: results that were taken for equal, were computed by each rank to make sure, and were not.
        unshared: operators that every rank runs by itself from then on.
    """

    time_limits: int = 0
    mismatches: int = 0
    unshared: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.time_limits or self.mismatches)


@dataclass(frozen=True, slots=True)
class SharingNotice(Shape):
    """The signal ``sharing`` of a job: all incidents of an epoch on a node so far. Told twice it counts once."""

    epoch: Epoch
    node: NodeId
    incidents: SharingIncidents
