"""A job's part on one node of a fleet: what its shim is told and what it answers.

A part goes through these phases, each reached by one operation of `proxy_runtime.shim.part_client.PartClient`:

    new ─prepare→ prepared ─connect→ running                 (fresh)
                                └──→ connected ─restore→ paused ─go→ running
    running ─stop_queues→ stopped ─finish→ finished ─write→ running (live), frozen (full) ─resume→ running
    any ─→ ended (its ranks have ended by themselves; the shim lingers) ─end→ gone
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from model.runtime import AttendResult, NodeParts
from model.shape import Shape
from model.sharing import SharingIncidents


class Phase(StrEnum):
    """Where a part stands."""

    NEW = "new"
    PREPARED = "prepared"
    CONNECTED = "connected"
    PAUSED = "paused"
    RUNNING = "running"
    STOPPED = "stopped"
    FINISHED = "finished"
    FROZEN = "frozen"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Limits(Shape):
    """After how many seconds without a next phase a shim lets the job run on by itself.

    Attributes:
        stopped: after `stop_queues` or `finish`.
        frozen: after `write` with ``full``.
    """

    stopped: float = 60.0
    frozen: float = 120.0


@dataclass(frozen=True, slots=True)
class Endpoint(Shape):
    """Where the device of the lower index listens for the device of the higher one, on another node.

    Attributes:
        low, high: global device indices.
        host, port: TCP address; the host is the one that `prepare` was given.
    """

    low: int
    high: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class PartStatus(Shape):
    """How a part is doing.

    Attributes:
        cut: number of the last cut that was begun, 0 for none.
        steps: per local rank, optimizer steps whose device work is done; see `Generation.steps`.
        device_ms: device time delivered in this epoch: local devices times milliseconds that they ran.
        loss: the last one that the job has reported; None where it reports none.
        living: local ranks that have not ended.
        rank_pids, proxy_pids: host pids, by rank and by global device index.
        attached: every living rank has taken its channel: before that there is nothing of torch to cut.
        sharing: what went wrong where ranks share a device; None for nothing.
        result: once the ranks have ended.
    """

    phase: Phase
    epoch: int
    cut: int = 0
    steps: dict[int, int] = field(default_factory=dict[int, int])
    device_ms: int = 0
    loss: float | None = None
    living: tuple[int, ...] = ()
    rank_pids: dict[int, int] = field(default_factory=dict[int, int])
    proxy_pids: dict[int, int] = field(default_factory=dict[int, int])
    attached: bool = False
    sharing: SharingIncidents | None = None
    result: AttendResult | None = None

    @property
    def step(self) -> int:
        """The lowest step of the local ranks."""
        return min(self.steps.values(), default=0)


@dataclass(frozen=True, slots=True)
class PartWritten(Shape):
    """What one node has written of a checkpoint into its own store; no manifest names it yet.

    Attributes:
        packs: ids of the packs that hold its chunks, in the node's store.
        stored_bytes: bytes added to the store.
        total_bytes: bytes that the parts refer to.
        created_at_ns: when the cut was frozen.
    """

    parts: NodeParts
    packs: tuple[str, ...]
    stored_bytes: int
    total_bytes: int
    created_at_ns: int
    timings_ms: dict[str, float] = field(default_factory=dict[str, float])
