"""What the tests of fabric and collectives share."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from tests.proxy_runtime.cut.program import SUM, Kind, pack

F32 = 6  # torch ScalarType


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Pair:
    """Two proxies with one rank each in this process, over an in-memory link that is delivered at once."""

    def __init__(self, native: ModuleType, placement: list[int] | None = None) -> None:
        self.link = native.MemoryLink()
        self.fabrics = [native.Fabric(0), native.Fabric(1)]
        self.fabrics[0].add_memory_peer(1, self.link, 0)
        self.fabrics[1].add_memory_peer(0, self.link, 1)
        self.engines = [native.Engine(p, placement or [0, 1], self.fabrics[p]) for p in (0, 1)]
        for engine in self.engines:
            engine.define(7, [0, 1])

    def issue(
        self, rank: int, kind: Kind, *, values: Sequence[float] | None = None, op: int = SUM, root: int = 0
    ) -> None:
        arrays = [] if values is None else [np.array(values, np.float32)]
        segments = [(F32, 4, a.nbytes) for a in arrays]
        self.engines[rank].issue(rank, 7, kind, op, root, segments, pack(arrays), 0)

    def settle(self) -> list[Any]:
        """Delivers and pumps until nothing moves; returns what has completed."""
        moving = True
        while moving:
            moving = False
            for side in (0, 1):
                moving |= self.engines[side].pump()
                moving |= self.link.deliver(side, 1 << 30) > 0
        return [done for engine in self.engines for done in engine.take_done()]
