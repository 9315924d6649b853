"""`elastic.overhead`: N ranks on one device over N times one rank alone, and over the same ranks on a device each.

Time is that of N ranks over N times that of a job of one rank, whose collectives move nothing: what N ranks sum up is
in the difference. An accelerator is not shared with the hosts that feed it, so here the device has a core of its own
on both sides, and all hosts the other. There N hosts get in one another's way: each takes up to half as much again as
one alone, and where a step is short their core is full, so that `wall` is theirs and not the device's. `wall_fed` is
the same with a device of half the speed on both sides, which they keep fed, as hosts with a core each would the whole
one. Two cores cannot serve N devices, so of these the CPU time of all N proxies is taken, and their time is told
without a condition. Windows of the sides are measured in turns. Bits on one device and at full width are compared.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.elastic.jobs import OVERHEAD, SCRIPT, WARM_STEPS, WAYS, splice_stats
from benchmarks.harness import BenchmarkError, Condition, Context, Figure, alternate, benchmark
from benchmarks.proxy.compare import interval, windows_of
from benchmarks.proxy.sides import Side, cpu_s, proxied

_PAIRS_A_REPEAT = 3
_HALF = 0.5
_WINDOW_S = 1.0  # of the ranks on one device: at its begin their queues are empty, which training knows once
_FEWEST_STEPS = 16


@dataclass(slots=True)
class _Measured:
    """Windows of one side: wall time as its slowest rank saw it, CPU time of its proxies, in s."""

    side: Side
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    hosts_cpu: list[float] = field(default_factory=list)

    def window(self, steps: int) -> float:
        before, hosts_before = self._cpu_s(), self._hosts_cpu_s()
        self.wall.append(max(answer["seconds"] for answer in self.side.ask("window", steps=steps)))
        self.cpu.append(self._cpu_s() - before)
        self.hosts_cpu.append(self._hosts_cpu_s() - hosts_before)
        return self.wall[-1]

    @property
    def hosts_busy(self) -> float:
        """How much of the time hosts had work to do, all together: 1 is all of their one core."""
        return statistics.median(cpu / wall for cpu, wall in zip(self.hosts_cpu, self.wall, strict=True))

    def _cpu_s(self) -> float:
        return sum(cpu_s(pid) for pid in self.side.others)

    def _hosts_cpu_s(self) -> float:
        return sum(cpu_s(process.pid) for process in self.side.processes)

    def forget(self) -> None:
        self.wall.clear()
        self.cpu.clear()
        self.hosts_cpu.clear()


def _measure(ways: int) -> Callable[[Context], Iterator[Figure]]:
    def measure(context: Context) -> Iterator[Figure]:
        with contextlib.ExitStack() as stack:

            def start(ranks: int, devices: int) -> _Measured:
                scratch = context.directory()
                return _Measured(stack.enter_context(proxied(SCRIPT, scratch=scratch, ranks=ranks, devices=devices)))

            spliced, full, alone = sides = start(ways, 1), start(ways, ways), start(1, 1)
            for each in (spliced, alone):
                each.side.each_on_its_core()
            for name, job in OVERHEAD.items():
                context.say(f"{name}, {ways} ranks on one device, on {ways}, and one alone")
                for each in sides:
                    each.side.ask("make", **job.fields)
                pairs, begin = _PAIRS_A_REPEAT * context.repeat, f"elastic.overhead.{name}.{ways}way"
                steps = _in_turns(sides, pairs, ways)
                yield from _figures(begin, spliced, full, alone, ways, job.weighs)
                with spliced.side.slowed(_HALF), alone.side.slowed(_HALF):
                    for each in (spliced, alone):
                        each.forget()
                    for first, _ in alternate(pairs):
                        (spliced if first else alone).window(steps)
                yield _wall(f"{begin}.wall_fed", spliced, alone, ways, job.weighs)

    measure.__doc__ = f"{ways} ranks on one device."
    return measure


def _in_turns(sides: tuple[_Measured, _Measured, _Measured], pairs: int, ways: int) -> int:
    """Measures the three sides; returns the steps of a window."""
    spliced, full, alone = sides
    for each in sides:
        each.window(WARM_STEPS)
    steps = max(_FEWEST_STEPS, windows_of(_WINDOW_S / ways, alone.window, most=64))
    for each in sides:
        each.forget()
    for first, pair in alternate(pairs):
        (spliced if first else full).window(steps)
        if first == (pair % 2 == 0):  # once a pair, between the two
            alone.window(steps)
    digests = [[answer["digest"] for answer in side.side.ask("digest")] for side in (spliced, full)]
    if digests[0] != digests[1]:
        raise BenchmarkError(
            f"{ways} ranks on one device and on {ways} gave different losses or weights: nothing to compare.",
            code="benchmark.different-bits",
        )
    return steps


def _figures(
    name: str, spliced: _Measured, full: _Measured, alone: _Measured, ways: int, weighs: bool
) -> Iterator[Figure]:
    details = {"splice": splice_stats(spliced.side)}
    yield beyond(f"{name}.cpu", spliced.cpu, full.cpu, _must(weighs), **details)
    yield _wall(f"{name}.wall", spliced, alone, ways, weighs)
    yield beyond(f"{name}.cpu_alone", spliced.cpu, [ways * each for each in alone.cpu], None)
    yield beyond(f"{name}.wall_full", spliced.wall, full.wall, None)


def _wall(name: str, spliced: _Measured, alone: _Measured, ways: int, weighs: bool) -> Figure:
    busy = {"hosts_busy": spliced.hosts_busy, "host_alone_busy": alone.hosts_busy}
    return beyond(name, spliced.wall, [ways * each for each in alone.wall], _must(weighs), **busy)


def _must(weighs: bool) -> Condition:
    return Condition("<", 0) if weighs else Condition("<=", 3)


def beyond(name: str, ours: list[float], bound: list[float], must: Condition | None, **details: object) -> Figure:
    """By how much ours is more, in percent: pairs of neighbouring windows."""
    samples = [(a / b - 1) * 100 for a, b in zip(ours, bound, strict=True)]
    found = {
        "interval_95": list(interval(samples)),
        "one_device_s": statistics.median(ours),
        "other_s": statistics.median(bound),
    }
    return Figure(name, "%", samples, must, details=found | details)


for _ways in WAYS:
    benchmark(f"elastic.overhead.{_ways}way")(_measure(_ways))
