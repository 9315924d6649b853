"""`elastic.bytes`, `elastic.copies`, `elastic.peak`, `elastic.full_width`: what ranks on one device keep and copy."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, log2

from benchmarks.elastic.jobs import BYTES, COPIES, OVERHEAD, PEAK, SCRIPT, WARM_STEPS, WAYS, splice_stats
from benchmarks.harness import Condition, Context, Figure, benchmark
from benchmarks.proxy.instructions import CALLS, count_in_proxy
from benchmarks.proxy.sides import Side, proxied

_WAYS = 4
_STEPS = 8
_OPERATOR = "add"


@benchmark("elastic.bytes")
def replicas(context: Context) -> Iterator[Figure]:
    """What the device gives back when all ranks give up parameters and optimizer state, over what one rank has."""
    with proxied(SCRIPT, scratch=context.directory(), ranks=_WAYS, devices=1) as side:
        for name in BYTES:
            side.ask("make", **OVERHEAD[name].fields)
            side.ask("window", steps=WARM_STEPS)
            sizes = side.ask("sizes")[0]
            kept = _given_back(side, statistics=False) / sizes["model"]
            yield Figure(f"elastic.bytes.{name}", "replicas", [kept], Condition("<=", 1), details={"sizes": sizes})
            if sizes["statistics"]:
                kept = _given_back(side, statistics=True) / sizes["statistics"]
                yield Figure(f"elastic.bytes.{name}.statistics", "replicas", [kept])


def _given_back(side: Side, statistics: bool) -> int:
    before = splice_stats(side)["physical_bytes"]
    side.ask("release", statistics=statistics)
    return before - splice_stats(side)["physical_bytes"]


@benchmark("elastic.copies")
def copies(context: Context) -> Iterator[Figure]:
    """Storages that were copied because a rank wrote to what others share, per step."""
    with proxied(SCRIPT, scratch=context.directory(), ranks=_WAYS, devices=1) as side:
        for name, job in COPIES.items():
            side.ask("make", **job.fields)
            side.ask("window", steps=WARM_STEPS)
            before = splice_stats(side)
            side.ask("window", steps=_STEPS)
            after = splice_stats(side)
            per_step = {key: (after[key] - before[key]) / _STEPS for key in after}
            yield Figure(f"elastic.copies.{name}", "copies", [per_step["copies"]], Condition("<=", 0), details=per_step)


@benchmark("elastic.peak")
def peak(context: Context) -> Iterator[Figure]:
    """The most bytes at once, over one rank's and the gradients that wait to be summed: the fit check's formula.

    In steps whose operators are known, as after any resize; and in a job's first steps, where a host stops at every
    new operator and holds what it would have given up.
    """
    for name in PEAK:
        with proxied(SCRIPT, scratch=context.directory()) as side:
            begun, one = _sizes(side, name)
        for ways in WAYS:
            with proxied(SCRIPT, scratch=context.directory(), ranks=ways, devices=1) as side:
                _sizes(side, name)
                first, steps = splice_stats(side), []
                for _ in range(_STEPS):
                    side.ask("window", steps=1)
                    steps.append(splice_stats(side)["step_peak_bytes"])
            waiting = ceil(log2(ways)) * one["gradients"]
            shares = [most / (one["peak"] + waiting) for most in steps]
            details = {"splice": first, "one": one}
            must = Condition("<=", 1.02)
            yield Figure(f"elastic.peak.{name}.{ways}", "x", shares, must, value=max(shares), details=details)
            share = first["peak_bytes"] / (begun["peak"] + waiting)
            yield Figure(f"elastic.peak.{name}.{ways}.first_steps", "x", [share], must)


def _sizes(side: Side, name: str) -> tuple[dict[str, int], dict[str, int]]:
    """Of the first rank: in its first steps, and in those after them."""
    side.ask("make", **OVERHEAD[name].fields)
    side.ask("window", steps=WARM_STEPS)
    begun = side.ask("sizes")[0]
    side.ask("forget_peak")
    side.ask("window", steps=_STEPS)
    return begun, side.ask("sizes")[0]


@benchmark("elastic.full_width")
def full_width(context: Context) -> Iterator[Figure]:
    """Instructions of a proxy of one rank, splicing allowed over switched off: nothing but a branch may be there.

    Two counts of the same differ by up to 3 %; what splicing costs where it is at work is ten times that.
    """
    context.say(f"{CALLS} calls of {_OPERATOR}, two runs under callgrind")
    allowed, off = (count_in_proxy(context, _OPERATOR, {"ERGO_SPLICE": how}) for how in ("on", "off"))
    details = {"instructions": allowed / CALLS, "off": off / CALLS}
    yield Figure("elastic.full_width", "x", [allowed / off], Condition("<=", 1.03), details=details)
