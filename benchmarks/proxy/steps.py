"""`proxy.step_time`: a training step proxied over the same step on the device without us."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from benchmarks.harness import BenchmarkError, Condition, Context, Figure, benchmark, paired
from benchmarks.proxy.compare import pairs, ratio, windows_of
from benchmarks.proxy.sides import Side, native, proxied

_WINDOW_S = 0.2
_WARM_STEPS = 20
_RANKS = {"ddp": 2}
WORKLOADS = ("mlp", "cnn", "gpt_64_fused", "gpt_64_foreach", "gpt_256_fused", "gpt_64_bf16", "lstm", "ddp")


def _step_time(workload: str) -> Callable[[Context], Iterator[Figure]]:
    def measure(context: Context) -> Iterator[Figure]:
        scratch, ranks = context.directory(), _RANKS.get(workload, 1)
        name = f"proxy.step_time.{workload}"
        with (
            native("steps.py", workload, scratch=scratch, ranks=ranks) as ours,
            proxied("steps.py", workload, scratch=scratch, ranks=ranks) as theirs,
        ):
            for side in (ours, theirs):
                side.ask("window", steps=_WARM_STEPS)
            tried: list[int] = []

            def trial(steps: int) -> float:
                tried.append(steps)
                return _window_s(ours, steps)

            steps = windows_of(_WINDOW_S, trial)
            for each in tried:  # both sides end after the same steps
                _window_s(theirs, each)
            context.say(f"{workload}: {pairs(context.repeat)} pairs of {steps} steps")
            before = ours.cpu_s(), theirs.cpu_s()
            times = paired(lambda: _window_s(ours, steps), lambda: _window_s(theirs, steps), pairs(context.repeat))
            total = steps * pairs(context.repeat)
            cpu = [(side.cpu_s() - at) / total * 1e3 for side, at in zip((ours, theirs), before, strict=True)]
            ends = [side.ask("digest") for side in (ours, theirs)]
        if ends[0][0]["digest"] != ends[1][0]["digest"]:
            raise BenchmarkError(
                f"Native and proxied runs of {workload} gave different losses or weights: nothing to compare.",
                code="benchmark.different-bits",
            )
        stats = ends[1][0]["stats"]
        details = {
            "native_ms": statistics.median(times.a) / steps * 1e3,
            "proxied_ms": statistics.median(times.b) / steps * 1e3,
            "native_cpu_ms": cpu[0],
            "proxied_cpu_ms": cpu[1],
            "stats": stats,
        }
        yield ratio(name, times, Condition("<=", 1.01), **details)
        yield Figure(f"proxy.misses.{workload}", "templates", [stats["defined"]], details={"stats": stats})

    return measure


def _window_s(side: Side, steps: int) -> float:
    return max(answer["seconds"] for answer in side.ask("window", steps=steps))


for _workload in WORKLOADS:
    benchmark(f"proxy.step_time.{_workload}")(_step_time(_workload))
