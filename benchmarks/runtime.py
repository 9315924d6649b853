"""The runtime alone: how fast a job stops, how long it is away, what a step and a rank cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from benchmarks.harness import BenchmarkError, Condition, Context, Figure, benchmark, paired
from benchmarks.runs import Cut, Outcome, Report, run_ergo, run_native

_QUIET = ("--log-every", "0", "--time-steps")
# Arguments that make a run long enough to measure and short enough to repeat.
_EXAMPLES: dict[str, tuple[str, ...]] = {
    "char_gpt": ("--steps", "120", *_QUIET),
    "digits_cnn": ("--steps", "400", *_QUIET),
    "mlp_sgd": ("--steps", "1500", "--sync-every", "25", *_QUIET),
}
_DOWNTIME_CUTS = 6
_FEWEST_CUTS = 5


@benchmark("runtime.stop_agree_ms")
def stop_agree(context: Context) -> Iterator[Figure]:
    """Request to all proxies stopped and agreed, in jobs that are seldom at a convenient place."""
    jobs = {
        1: ("tests/jobs/evaluation.py", ("--rounds", "400")),
        2: ("tests/jobs/ddp_skew.py", ("--epochs", "60")),
        4: ("tests/jobs/ddp_skew.py", ("--epochs", "40")),
    }
    for ranks, (script, arguments) in jobs.items():
        context.say(f"{ranks} ranks of {script}, live cuts")
        _, report = run_ergo(
            script,
            arguments,
            ranks=ranks,
            cwd=context.directory(),
            options=("--live", "--cut-every", "300ms"),
            reports_digests=False,
        )
        cuts = _done(report, "checkpointed")
        samples = [cut.stop_agree_ms for cut in cuts]
        details = {"stop_ms": [cut.ms["stop"] for cut in cuts], "agree_ms": [cut.ms["agree"] for cut in cuts]}
        yield Figure(f"runtime.stop_agree_ms.{ranks}", "ms", samples, Condition("<=", 20), details=details)


@benchmark("runtime.downtime_s")
def downtime(context: Context) -> Iterator[Figure]:
    """Two ranks are cut, killed and restored: the gap between two steps, as the script sees it, and its parts."""
    every = 30
    arguments = ("--steps", str(every * (_DOWNTIME_CUTS + 1)), "--sync-every", "1", *_QUIET)
    at = [part for n in range(_DOWNTIME_CUTS) for part in ("--cut-at", str(every * (n + 1)))]
    outcome, report = run_ergo("examples/char_gpt.py", arguments, ranks=2, cwd=context.directory(), options=at)
    cuts = _done(report, "moved")
    gaps = cut_gaps_s(outcome, len(cuts))
    told = statistics.median(cut.ms["downtime"] for cut in cuts) / 1e3
    if statistics.median(gaps) < told / 2:
        raise BenchmarkError(
            f"The script's clock saw gaps of {statistics.median(gaps):.2f} s where the runtime tells {told:.2f} s."
        )
    yield Figure("runtime.downtime_s", "s", gaps, Condition("<", 2), details={"cuts": [cut.ms for cut in cuts]})
    yield from downtime_parts(cuts)


def cut_gaps_s(outcome: Outcome, cuts: int) -> list[float]:
    """Downtimes in seconds as rank 0 saw them: its longest steps, less an ordinary one."""
    times = outcome.times[0]
    return [(longest - times.median) / 1e3 for longest in times.longest[:cuts]]


def downtime_parts(cuts: list[Cut]) -> Iterator[Figure]:
    """A figure for every part of a cut that the runtime tells; they explain, so they have no condition.

    Parts may overlap (the device's dump runs beside the processes'), so they need not add up.
    """
    yield Figure("runtime.downtime_s.barrier", "s", [cut.stop_agree_ms / 1e3 for cut in cuts])
    names = dict.fromkeys(name for cut in cuts for name in cut.ms)
    for name in names:
        if name not in ("stop", "agree", "wait_for_step"):
            samples = [cut.ms[name] / 1e3 for cut in cuts if name in cut.ms]
            yield Figure(f"runtime.downtime_s.{'told' if name == 'downtime' else name}", "s", samples)


def _step_ratio(example: str, ranks: int) -> Callable[[Context], Iterator[Figure]]:
    def measure(context: Context) -> Iterator[Figure]:
        script, arguments = f"examples/{example}.py", _EXAMPLES[example]
        outcomes: list[Outcome] = []

        def native() -> float:
            outcomes.append(run_native(script, arguments, ranks=ranks, cwd=context.directory()))
            return outcomes[-1].times[0].median

        def proxied() -> float:
            outcome, _ = run_ergo(script, arguments, ranks=ranks, cwd=context.directory())
            outcomes.append(outcome)
            return outcome.times[0].median

        context.say(f"{ranks} ranks of {script}, natively and proxied in turns, {context.repeat} pairs")
        times = paired(native, proxied, context.repeat)
        if any(outcome.digests != outcomes[0].digests for outcome in outcomes):
            raise BenchmarkError(
                f"Native and proxied runs of {script} gave different losses or weights: nothing to compare.",
                code="benchmark.different-bits",
            )
        suffix = f".{ranks}_ranks" if ranks > 1 else ""
        details = {"native_ms": times.a, "proxied_ms": times.b}
        yield Figure(f"runtime.step_ratio.{example}{suffix}", "x", times.ratios, Condition("<=", 1.1), details=details)

    return measure


for _example in _EXAMPLES:
    benchmark(f"runtime.step_ratio.{_example}")(_step_ratio(_example, ranks=1))
    benchmark(f"runtime.step_ratio.{_example}.2_ranks")(_step_ratio(_example, ranks=2))


@benchmark("runtime.rank_rss_mb")
def rank_memory(context: Context) -> Iterator[Figure]:
    """Largest resident memory of a rank of the two-rank example."""
    arguments = ("--steps", "60", "--log-every", "0")
    _, report = run_ergo("examples/char_gpt.py", arguments, ranks=2, cwd=context.directory())
    if not report.rss_mb:
        raise BenchmarkError("The run ended before the memory of its ranks was sampled.")
    yield Figure("runtime.rank_rss_mb", "MB", report.rss_mb, Condition("<=", 280), value=max(report.rss_mb))


def _done(report: Report, outcome: str) -> list[Cut]:
    """The cuts that were done; the last one of a run may find the job ended."""
    failed = [cut.error for cut in report.cuts if cut.outcome == "called-off"]
    if failed:
        raise BenchmarkError(
            f"{len(failed)} of {len(report.cuts)} cuts were called off, the first because: {failed[0]}"
        )
    done = [cut for cut in report.cuts if cut.outcome == outcome]
    if len(done) < _FEWEST_CUTS:
        raise BenchmarkError(f"Only {len(done)} cuts were {outcome} before the job ended, {_FEWEST_CUTS} are needed.")
    return done
