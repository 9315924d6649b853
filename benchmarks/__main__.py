"""``python -m benchmarks [PATTERN]``: runs the benchmarks whose names match, one line a figure on stdout.

Each figure is also appended, with machine, versions and command, to ``benchmarks/results.jsonl``. Exit code 0: all
conditions hold; 1: one falls short, or a benchmark could not measure; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import elastic, fleet, proxy, runtime, scheduling, scheduling_live, store  # noqa: F401  (they register their benchmarks)
from benchmarks.harness import Benchmark, Context, select
from benchmarks.machine import describe_machine, describe_versions
from proxy_runtime.errors import ErgoError

RESULTS = Path(__file__).with_name("results.jsonl")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Runs benchmarks by name.")
    parser.add_argument("pattern", nargs="?", default="", help="part of a name, or a shell pattern; default: all")
    parser.add_argument("--list", action="store_true", help="only print the names")
    parser.add_argument("--repeat", type=int, default=3, help="pairs of runs in a comparison")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to append to")
    chosen = parser.parse_args(arguments)
    if chosen.repeat < 1:
        parser.error("--repeat must be at least 1")
    benchmarks = select(chosen.pattern)
    if not benchmarks:
        parser.error(f"no benchmark's name matches {chosen.pattern!r}; --list shows them")
    if chosen.list:
        print("\n".join(benchmarks))
        return 0
    given = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, _interrupt)  # what was started is ended on the way out
    return run_all(benchmarks, chosen.repeat, chosen.results, shlex.join(["python", "-m", "benchmarks", *given]))


def run_all(benchmarks: Mapping[str, Benchmark], repeat: int, results: Path, command: str) -> int:
    """Runs benchmarks one after the other; a failure of one does not stop the next."""
    code = 0
    for name, function in benchmarks.items():
        _say(f"{name} ...")
        with tempfile.TemporaryDirectory(prefix="ergo-bench-") as scratch:
            try:
                for figure in function(Context(repeat, Path(scratch), _say)):
                    print(figure.line(), flush=True)
                    _append(results, figure.record() | {"benchmark": name, "command": command})
                    code |= not figure.holds
            except ErgoError as error:
                _say(f"{name} not measured: {error}")
                code = 1
    return code


def _interrupt(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _append(results: Path, record: dict[str, Any]) -> None:
    """Adds one line, in one write, so that a reader never sees half of one."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    line = json.dumps({"at": now, **record, "machine": describe_machine(), "versions": describe_versions()})
    with results.open("a") as file:
        file.write(line + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        _say("interrupted: what was started has been ended.")
        sys.exit(130)
