"""One device proxy in a process of its own, for test_collectives.py: runs the ranks placed on it to their end.

Reads one JSON object from its arguments; prints the final state of each of its ranks.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from tests.native.build import fabric_module
from tests.proxy_runtime.cut.program import DTYPES, Touch, fold, inputs, pack, random_program


class Proxy:
    """Engine, fabric and the ranks of one proxy."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        native = fabric_module()
        self.me: int = plan["self"]
        self.program = random_program(random.Random(plan["seed"]), len(plan["placement"]), plan["length"])
        self.fabric = native.Fabric(self.me)
        for peer, fd, first_half in plan["shm"]:
            self.fabric.add_shm_peer(peer, fd, first_half)
        tcp = [tuple(entry) for entry in plan["tcp"]]
        if tcp:
            self.fabric.connect_tcp_peers(tcp, plan["token"].encode(), plan["timeout_s"])
        self.engine = native.Engine(self.me, plan["placement"], self.fabric)
        self.arrived: dict[int, dict[int, list[bytes]]] = {}
        self.states: dict[int, int] = {}

    def run(self) -> None:
        """Runs all ranks in turn until they end; raises if a peer that is needed is lost or the time is over."""
        deadline = time.monotonic() + self.plan["timeout_s"]
        ranks = {r: self._rank(r) for r, proxy in enumerate(self.plan["placement"]) if proxy == self.me}
        for _ in self._until(ranks):
            if time.monotonic() > deadline:
                raise TimeoutError(f"proxy {self.me}: ranks {sorted(ranks)} have not ended")
            self.engine.wait(0.5)
            for rank, index, blocks, error in self.engine.take_done():
                assert not error
                self.arrived.setdefault(rank, {})[index] = blocks
            if why := self.engine.waiting_for_lost_peer():
                raise ConnectionError(why)

    def _until(self, ranks: dict[int, Iterator[None]]) -> Iterator[None]:
        while True:
            for rank in list(ranks):
                try:
                    next(ranks[rank])
                except StopIteration:
                    del ranks[rank]
            if not ranks:
                return
            yield

    def _rank(self, rank: int) -> Iterator[None]:
        """A rank's life; yields where it waits."""
        state = rank + 1
        waiting: list[int] = []
        known: set[int] = set()
        arrived = self.arrived.setdefault(rank, {})
        for step in [*self.program.of(rank), Touch(rank)]:
            if isinstance(step, Touch):
                while not all(index in arrived for index in waiting):
                    yield
                for index in waiting:
                    state = fold(state, arrived.pop(index))
                waiting.clear()
                continue
            if step.comm not in known:
                self.engine.define(step.comm, list(step.members))
                known.add(step.comm)
            if step.index == self.plan.get("die_at"):
                sys.exit(77)
            kind, op, root = step.issued(rank)
            own = step.specs[step.members.index(rank)]
            segments = [(code, DTYPES[code]().itemsize, n * DTYPES[code]().itemsize) for code, n in own]
            packed = pack(inputs(step, rank, state))
            self.engine.issue(rank, step.comm, kind, op, root, segments, packed, step.index)
            waiting.append(step.index)
        self.states[rank] = state


def main() -> None:
    """Runs the proxy that the first argument describes."""
    proxy = Proxy(json.loads(sys.argv[1]))
    proxy.run()
    ended = proxy.fabric.shutdown(proxy.plan["timeout_s"])
    print(json.dumps({"states": proxy.states, "ended": ended, "sent": proxy.fabric.bytes_sent()}))


if __name__ == "__main__":
    main()
