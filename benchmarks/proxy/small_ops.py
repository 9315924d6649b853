"""`proxy.enqueue`: until a small operator returns, Python and the release of its result included.
`proxy.unseen_template`: until one returns that the proxy has to be asked about.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.harness import Condition, Context, Figure, benchmark, paired
from benchmarks.proxy.compare import pairs, ratio
from benchmarks.proxy.sides import Side, native, proxied

OPERATORS = ("add", "mul_scalar", "add_", "mm", "layer_norm", "view", "empty", "foreach_add_", "relu", "item")
# A value that an operator has just made takes a round trip between two processes: told, without a condition.
_TOLD = ("item_of_fresh",)
_CALLS = 1000
_CALLS_OF_LISTS = 100
_MISSES = 200  # of small tensors: the operator's own time is none


@benchmark("proxy.enqueue")
def enqueue(context: Context) -> Iterator[Figure]:
    """Ten operators on 8 x 8 tensors (one on a list of 100), native and proxied in turns, on a core each."""
    scratch = context.directory()
    with native("small_ops.py", scratch=scratch) as ours, proxied("small_ops.py", scratch=scratch) as theirs:
        for side in (ours, theirs):
            side.each_on_its_core()
        context.say(f"{len(OPERATORS)} operators, {pairs(context.repeat)} pairs of windows each")
        for name in (*OPERATORS, *_TOLD):
            calls = _CALLS_OF_LISTS if name == "foreach_add_" else _CALLS

            def window(side: Side, name: str = name, calls: int = calls) -> float:
                return side.ask("timed", operator=name, calls=calls)[0]["seconds"] / calls * 1e6

            for side in (ours, theirs):
                window(side)
            before = ours.waited_s(), theirs.waited_s()
            times = paired(lambda w=window: w(ours), lambda w=window: w(theirs), pairs(context.repeat))
            must = None if name in _TOLD else Condition("<=", 1.0)
            waited = {"native": ours.waited_s() - before[0], "proxied": theirs.waited_s() - before[1]}
            yield ratio(f"proxy.enqueue.{name}", times, must, waited_s=waited)
            yield Figure(f"proxy.enqueue.{name}.us", "us", times.b, details={"native": times.a})


@benchmark("proxy.unseen_template")
def unseen_template(context: Context) -> Iterator[Figure]:
    """A call whose key is new: the proxy executes it and says what it returns."""
    with proxied("small_ops.py", scratch=context.directory()) as side:
        side.ask("unseen", calls=_MISSES)
        samples = [
            side.ask("unseen", calls=_MISSES)[0]["seconds"] / _MISSES * 1e6 for _ in range(pairs(context.repeat))
        ]
        yield Figure("proxy.unseen_template", "us", samples, Condition("<=", 10), value=statistics.median(samples))
