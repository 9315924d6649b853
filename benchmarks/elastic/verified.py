"""`elastic.verified`: what it costs that one of 1,024 results that ranks share is computed by each and compared.

Half a percent cannot be told from the noise of a machine, so it is not measured at that rate. Two live sides run the
same spliced job, one with comparisons off and one that compares one of 16; windows alternate. The difference of their
proxies' CPU time, in percent of the side without, is scaled to one of 1,024 by what was really compared: counters say
which part of all calls that were shared on the one side was computed again on the other. (A call is passed over if it
would take more than 32 MiB, or raise the device's peak; the next is taken, so that less than one of 16 is compared. No
more than one of 1,024 is compared by default for the same reason.) The value is the mean of all pairs: few calls are
most of the cost, so that a median of windows would be too low. The bits of both sides are compared.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.elastic.jobs import OVERHEAD, SCRIPT, WARM_STEPS, splice_stats
from benchmarks.harness import BenchmarkError, Condition, Context, Figure, alternate, benchmark
from benchmarks.proxy.compare import interval, pairs, windows_of
from benchmarks.proxy.sides import Side, cpu_s, proxied

RATE = 1024
"""By default one of so many is compared (`verify_one_of_` in `splicer.hpp`)."""
_DENSE = 16
_WAYS = (4, 8)
_JOBS = ("mlp_adamw_foreach", "gpt_64_adamw_foreach", "gpt_256_adamw_foreach")
_WINDOW_S = 0.6
_FEWEST_STEPS = 8


class Counted(Protocol):
    """CPU time of a proxy in each window, in s, and what it has counted in all of them."""

    cpu: list[float]

    def counted(self) -> dict[str, int]: ...


@dataclass(slots=True)
class _Measured:
    """CPU time of a side's proxy for each window, in s, and what its counters said before the first."""

    side: Side
    cpu: list[float] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)

    def begin(self) -> None:
        self.cpu.clear()
        self.before = splice_stats(self.side)

    def window(self, steps: int) -> float:
        (pid,) = self.side.others
        before = cpu_s(pid)
        seconds = max(answer["seconds"] for answer in self.side.ask("window", steps=steps))
        self.cpu.append(cpu_s(pid) - before)
        return float(seconds)

    def counted(self) -> dict[str, int]:
        return {name: value - self.before[name] for name, value in splice_stats(self.side).items()}


def _measure(ways: int) -> Callable[[Context], Iterator[Figure]]:
    def measure(context: Context) -> Iterator[Figure]:
        for name in _JOBS:  # each in processes of its own: what a device has had at most is part of the rule
            context.say(f"{name}, {ways} ranks on one device, one of {_DENSE} results compared, and none")
            with contextlib.ExitStack() as stack:

                def start(rate: int, stack: contextlib.ExitStack = stack) -> _Measured:
                    with _environment("ERGO_SPLICE_VERIFY", str(rate)):
                        side = proxied(SCRIPT, scratch=context.directory(), ranks=ways, devices=1)
                        return _Measured(stack.enter_context(side))

                none, dense = start(0), start(_DENSE)
                steps = _in_turns(none, dense, name, pairs(context.repeat))
                yield cost(f"elastic.verified.{name}.{ways}way", none, dense, steps)

    measure.__doc__ = f"{ways} ranks on one device."
    return measure


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable for what is started here."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _in_turns(none: _Measured, dense: _Measured, job: str, count: int) -> int:
    """How many steps each side has made."""

    def both(steps: int) -> float:
        dense.window(steps)
        return none.window(steps)

    for each in (none, dense):
        each.side.ask("make", **OVERHEAD[job].fields)
    both(WARM_STEPS)
    steps = max(_FEWEST_STEPS, windows_of(_WINDOW_S, both, most=128))
    for each in (none, dense):
        each.begin()
    for first, _ in alternate(count):
        (none if first else dense).window(steps)
    if none.side.ask("digest") != dense.side.ask("digest"):
        raise BenchmarkError(
            f"{job} with results compared gave other losses or weights than without: nothing to compare.",
            code="benchmark.different-bits",
        )
    return steps * count


def cost(name: str, none: Counted, dense: Counted, steps: int) -> Figure:
    """What comparisons take at the default rate, in percent of the CPU time of the side without any."""
    plain, compared = none.counted(), dense.counted()
    again = plain["shared"] - compared["shared"]  # computed by a rank though another has the result
    if again <= 0 or compared["mismatches"] or compared["verified"] == 0:
        raise BenchmarkError(f"Nothing was compared, or not well: {compared} beside {plain}.")
    one_of = plain["shared"] / again
    excess = [(b / a - 1) * 100 for a, b in zip(none.cpu, dense.cpu, strict=True)]
    scaled = [each * one_of / RATE for each in excess]
    details = {
        "interval_95": list(interval(scaled, of=statistics.fmean)),
        "scaled": f"from one of {one_of:.1f} that was compared to one of {RATE}",
        "excess_measured": statistics.fmean(excess),
        "excess_interval_95": list(interval(excess, of=statistics.fmean)),
        "none_ms": statistics.fmean(none.cpu) * len(none.cpu) / steps * 1e3,
        "compared_per_step": compared["verified"] / steps,
        "again_per_step": again / steps,
        "shared_per_step": plain["shared"] / steps,
        "timeouts": [plain["timeouts"], compared["timeouts"]],
    }
    return Figure(name, "%", scaled, Condition("<=", 0.5), statistics.fmean(scaled), details)


for _ways in _WAYS:
    benchmark(f"elastic.verified.{_ways}way")(_measure(_ways))
