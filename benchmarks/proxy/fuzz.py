"""`proxy.fuzz`: the decoders of what others send, fuzzed for a bounded time.

Ring, messages, fabric and rendezvous store; with torch linked, definitions of operators, answers to them, state files.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import BenchmarkError, Condition, Context, Figure, benchmark
from tests.native.fuzz import TARGETS, find_clang

_SECONDS = 60  # of each fuzzer
_INSTALLER = Path(__file__).resolve().parents[2] / "scripts" / "fuzzer_packages.sh"


@benchmark("proxy.fuzz")
def run(context: Context) -> Iterator[Figure]:
    """Executions, and crashes that the corpus did not have."""
    clang = find_clang()
    if clang is None:
        subprocess.run([_INSTALLER], check=False)
        clang = find_clang()
    if clang is None:
        raise BenchmarkError(
            "The decoders are fuzzed with libFuzzer, and clang is not installed.",
            remedy="Install it as root (scripts/fuzzer_packages.sh).",
        )
    for target in TARGETS:
        found = target.fuzz(clang, _SECONDS, context.directory())
        if found.report:
            context.say(found.report[-4000:])
        yield Figure(f"proxy.fuzz.{target.name}.executions", "", [found.executions], Condition(">", 0))
        yield Figure(f"proxy.fuzz.{target.name}.crashes", "", [found.crashes], Condition("<=", 0))
