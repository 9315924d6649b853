"""`proxy.instructions`: instructions that our code takes for an operator, in the rank and in the proxy.

Counted by callgrind, so that a regression shows whatever the machine does meanwhile. Only what happens below the named
functions is counted, for calls whose template is known: nobody waits there. The proxy's count includes the operators
themselves, on 8 x 8 tensors; for one version of torch they are always the same.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.harness import BenchmarkError, Condition, Context, Figure, benchmark
from benchmarks.proxy import sides
from benchmarks.runs import environment
from proxy_runtime.channel.ring import Ring

# Entering one of them switches the count on, leaving it off.
_RANK = ("ergo::rank::(anonymous namespace)::Unboxed*", "ergo::rank::forward_operator(*", "*delete_storage*")
_PROXY = ("ergo::device::RankServer::handle(*",)
_SUMMARY = re.compile(r"^(?:summary|totals): (\d+)$", re.MULTILINE)
CALLS = 2000
# Instructions a call, with torch 2.15. Counts of two runs differ by up to 3 %, a tenth more is a regression: who makes
# one on purpose, or makes it better, writes down the new counts here and says why (docs/speed.md).
_BASELINES = {"add": {"rank": 3792, "proxy": 9388}, "layer_norm": {"rank": 8126, "proxy": 23860}}
_REGRESSION = 1.1


@benchmark("proxy.instructions")
def instructions(context: Context) -> Iterator[Figure]:
    """A rank under callgrind with an ordinary proxy, and an ordinary rank with a proxy under callgrind."""
    if shutil.which("valgrind") is None:
        raise BenchmarkError(
            "Instructions are counted by callgrind, and valgrind is not installed.",
            remedy="Install it (apt-get install valgrind).",
        )
    for operator, baselines in _BASELINES.items():
        context.say(f"{CALLS} calls of {operator}, two runs under callgrind")
        for side, count in (("rank", _rank), ("proxy", count_in_proxy)):
            found = count(context, operator) / CALLS
            bound = Condition("<=", round(baselines[side] * _REGRESSION))
            name = f"proxy.instructions.{side}.{operator}"
            yield Figure(name, "instructions", [found], bound, details={"baseline": baselines[side]})


def _callgrind(out: Path, functions: tuple[str, ...]) -> list[str]:
    toggles = [f"--toggle-collect={name}" for name in functions]
    return [
        "valgrind",
        "--tool=callgrind",
        "-q",
        "--fair-sched=yes",
        "--instr-atstart=no",
        f"--callgrind-out-file={out}",
        *toggles,
    ]


def _begin(pid: int) -> None:
    """Counts from here on: the import of torch would take minutes."""
    done = subprocess.run(
        ["callgrind_control", "--instr=on", str(pid)], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode != 0:
        raise BenchmarkError(f"callgrind cannot be switched on: {(done.stdout + done.stderr)[-300:]}")


def _counted(out: Path) -> int:
    found = _SUMMARY.findall(out.read_text()) if out.exists() else []
    if not found or int(found[-1]) == 0:
        raise BenchmarkError("callgrind counted nothing; do the functions that it looks for still have these names?")
    return int(found[-1])


def _rank(context: Context, operator: str) -> int:
    scratch = context.directory()
    with sides.proxied("small_ops.py", scratch=scratch, prefix=_callgrind(scratch / "out", _RANK)) as side:
        side.ask("timed", operator=operator, calls=1)
        _begin(side.processes[0].pid)
        side.ask("timed", operator=operator, calls=CALLS)
    return _counted(scratch / "out")


def count_in_proxy(context: Context, operator: str, more: Mapping[str, str] = MappingProxyType({})) -> int:
    """Instructions that `CALLS` calls take in a proxy; `more` goes into its environment."""
    scratch, made = context.directory(), sides.runtime_build()
    with contextlib.ExitStack() as stack:
        ring = stack.enter_context(Ring.create(0, made.id))
        proxy = subprocess.Popen(
            [
                *_callgrind(scratch / "out", _PROXY),
                *(sys.executable, str(sides.JOBS / "bare_proxy.py"), str(made.device_dir), str(ring.fd)),
            ],
            env=environment() | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} | dict(more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[ring.fd],
            stderr=stack.enter_context((scratch / "valgrind.txt").open("w")),
            text=True,
        )
        stack.callback(sides.end, proxy)
        assert proxy.stdout is not None
        if proxy.stdout.readline() != "serving\n":
            raise BenchmarkError("A device proxy under callgrind has not started.")
        side = stack.enter_context(sides.rank_of(ring, "small_ops.py", scratch=scratch))
        side.ask("timed", operator=operator, calls=1)
        side.ask("timed", operator="item", calls=1)
        _begin(proxy.pid)
        side.ask("timed", operator=operator, calls=CALLS)
        side.ask("timed", operator="item", calls=1)
    return _counted(scratch / "out")
