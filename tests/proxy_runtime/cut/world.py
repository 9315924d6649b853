"""Ranks on in-process device proxies: the real engine on in-memory links whose every delivery the test chooses."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from proxy_runtime.cut.agreement import SequenceCounts, targets, verify_completed
from tests.proxy_runtime.cut.program import DTYPES, Call, Program, Touch, Truth, fold, inputs, pack


@dataclass(slots=True)
class RankState:
    """What a checkpoint holds of a rank, and what runs."""

    position: int = 0
    state: int = 0
    waiting: list[int] = field(default_factory=list)  # calls issued and not folded, in order
    arrived: dict[int, list[bytes]] = field(default_factory=dict)
    comms: set[int] = field(default_factory=set)

    def copy(self) -> RankState:
        return RankState(self.position, self.state, list(self.waiting), dict(self.arrived), set(self.comms))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed cut."""

    ranks: list[RankState]
    counts: list[dict[str, int]]
    pending: list[list[tuple[int, dict[str, Any]]]]  # (call index, descriptor and input) in issue order
    completed_by: dict[int, set[int]]  # the test's own book: call index -> ranks

    @classmethod
    def start(cls, program: Program) -> Checkpoint:
        """The state before the first step."""
        ranks = [RankState(state=rank + 1) for rank in range(program.ranks)]
        return cls(ranks, [{} for _ in ranks], [[] for _ in ranks], {})


class Stuck(AssertionError):
    """Nothing can happen any more and something still should."""


class World:
    """A program running on `placement` (rank -> proxy), continued from a checkpoint."""

    def __init__(
        self,
        native: ModuleType,
        program: Program,
        truth: Truth,
        placement: list[int],
        checkpoint: Checkpoint,
        source: random.Random,
    ) -> None:
        self.program, self.truth, self.placement, self.source = program, truth, placement, source
        self.proxies = max(placement) + 1
        self.steps = [program.of(rank) for rank in range(program.ranks)]
        self.ranks = [rank.copy() for rank in checkpoint.ranks]
        self.fabrics = [native.Fabric(p) for p in range(self.proxies)]
        self.links = {(a, b): native.MemoryLink() for a in range(self.proxies) for b in range(a + 1, self.proxies)}
        for (a, b), link in self.links.items():
            self.fabrics[a].add_memory_peer(b, link, 0)
            self.fabrics[b].add_memory_peer(a, link, 1)
        self.engines = [native.Engine(p, placement, self.fabrics[p]) for p in range(self.proxies)]
        self.dirty = set(range(self.proxies))
        self.stopped: set[int] = set()
        self.completed_by = {index: set(by) for index, by in checkpoint.completed_by.items()}
        self.call_of_ticket: dict[tuple[int, int], int] = {}
        self._load(checkpoint)

    # What a scheduler may choose from

    def runnable(self) -> list[int]:
        """Ranks that can take a step."""
        found = []
        for rank, state in enumerate(self.ranks):
            if self.placement[rank] in self.stopped:
                continue
            if state.position == len(self.steps[rank]):
                if state.waiting and all(index in state.arrived for index in state.waiting):
                    found.append(rank)
                continue
            step = self.steps[rank][state.position]
            if isinstance(step, Call) or all(index in state.arrived for index in state.waiting):
                found.append(rank)
        return found

    def act(self) -> bool:
        """Does one thing chosen at random; false if nothing can be done."""
        actions: list[tuple[str, Any]] = [("step", rank) for rank in self.runnable()]
        actions += [("pump", proxy) for proxy in self.dirty]
        actions += [
            ("deliver", (pair, side)) for pair, link in self.links.items() for side in (0, 1) if link.in_flight(side)
        ]
        if not actions:
            return False
        what, which = self.source.choice(actions)
        if what == "step":
            self.step(which)
        elif what == "pump":
            self.pump(which)
        else:
            pair, side = which
            # A few bytes, so that frames arrive in pieces, or all there is.
            amount = self.source.choice([1, 40, 88, 300, 10_000, 1 << 40])
            self.links[pair].deliver(side, amount)
            self.dirty.add(pair[1 - side])
        return True

    def step(self, rank: int) -> None:
        state = self.ranks[rank]
        if state.position == len(self.steps[rank]) or isinstance(self.steps[rank][state.position], Touch):
            for index in state.waiting:
                state.state = fold(state.state, state.arrived.pop(index))
            state.waiting.clear()
            state.position += state.position < len(self.steps[rank])
            return
        call = self.steps[rank][state.position]
        assert isinstance(call, Call)
        if call.comm not in state.comms:
            # Its own message on the ring, and so its own step: others' contributions may come before it.
            self.engines[self.placement[rank]].define(call.comm, list(call.members))
            state.comms.add(call.comm)
            return
        kind, op, root = call.issued(rank)
        own = call.specs[call.members.index(rank)]
        segments = [(code, DTYPES[code]().itemsize, count * DTYPES[code]().itemsize) for code, count in own]
        self._issue(rank, call.index, (call.comm, kind, op, root, segments, pack(inputs(call, rank, state.state))))
        state.waiting.append(call.index)
        state.position += 1

    def pump(self, proxy: int) -> None:
        engine = self.engines[proxy]
        if not engine.pump():
            self.dirty.discard(proxy)
        for rank, index, blocks, error in engine.take_done():
            assert not error
            assert blocks == self.truth.results[index, rank], f"call {index} at rank {rank}: other bits"
            self.ranks[rank].arrived[index] = blocks
            self.completed_by.setdefault(index, set()).add(rank)

    def done(self) -> bool:
        return all(s.position == len(self.steps[r]) and not s.waiting for r, s in enumerate(self.ranks))

    # A cut

    def reports(self) -> list[dict[str, SequenceCounts]]:
        return [self.engines[self.placement[rank]].counts(rank) for rank in range(self.program.ranks)]

    def agree(self) -> dict[str, int]:
        """Targets from the counts; all proxies must have stopped."""
        assert len(self.stopped) == self.proxies
        return targets(self.reports())

    def check_cut(self, goal: dict[str, int]) -> None:
        """Every call is complete at all its participants or at none, and the counts are the targets."""
        reports = self.reports()
        members = {sequence: c["members"] for report in reports for sequence, c in report.items()}
        agreed = verify_completed(
            [
                {sequence: {rank: c["completed"]} for sequence, c in report.items()}
                for rank, report in enumerate(reports)
            ],
            members,
        )
        assert agreed == goal
        for step in self.program.steps:
            if isinstance(step, Call):
                by = self.completed_by.get(step.index, set())
                assert not by or by == set(step.participants), f"call {step.index} is complete at {by} only"

    def dump(self) -> Checkpoint:
        counts = [{name: c["completed"] for name, c in report.items()} for report in self.reports()]
        pending = []
        for rank in range(self.program.ranks):
            engine = self.engines[self.placement[rank]]
            pending.append([(self.call_of_ticket[self.placement[rank], p["ticket"]], p) for p in engine.pending(rank)])
            unfinished = [index for index in self.ranks[rank].waiting if index not in self.ranks[rank].arrived]
            assert [index for index, _ in pending[-1]] == unfinished, "pending operations are in issue order"
        by = {index: set(ranks) for index, ranks in self.completed_by.items()}
        return Checkpoint([rank.copy() for rank in self.ranks], counts, pending, by)

    def resume(self) -> None:
        for engine in self.engines:
            engine.resume()
        self.stopped.clear()
        self.dirty = set(range(self.proxies))

    def kill(self, proxy: int) -> None:
        """The proxy dies: what it had not delivered is gone."""
        for pair, link in self.links.items():
            if proxy in pair:
                link.close()

    def _load(self, checkpoint: Checkpoint) -> None:
        order = list(range(self.program.ranks))
        self.source.shuffle(order)
        for rank in order:
            engine = self.engines[self.placement[rank]]
            for comm in sorted(self.ranks[rank].comms):
                engine.define(comm, list(self.program.comms[comm]))
            engine.restore_counts(rank, checkpoint.counts[rank])
            for index, p in checkpoint.pending[rank]:
                again = (p["comm"], p["kind"], p["op"], p["root"], p["segments"], p["input"])
                self._issue(rank, index, again)
        verify_completed(
            [{name: {rank: c["completed"]} for name, c in report.items()} for rank, report in enumerate(self.reports())]
        )

    def _issue(self, rank: int, index: int, arguments: tuple[Any, ...]) -> None:
        proxy = self.placement[rank]
        ticket = self.engines[proxy].issue(rank, *arguments, index)
        self.call_of_ticket[proxy, ticket] = index
        self.dirty.add(proxy)
