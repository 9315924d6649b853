"""Building and running the fuzzer of the decoders: libFuzzer, of clang."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.native.build import HERE, NATIVE, SANITIZERS, compile_native

CORPUS = HERE / "corpus" / "decoders"
SOURCES = [
    HERE / "fuzz_decoders.cpp",
    *(NATIVE / f"{name}.cpp" for name in ("ring_consumer", "fabric", "streams", "store")),
]


@dataclass(frozen=True, slots=True)
class Found:
    """What a run of the fuzzer found; `report` is its output where it crashed."""

    executions: int
    crashes: int
    report: str


def find_clang() -> str | None:
    """A clang++ on the path, the plain one first."""
    names = ["clang++", *(f"clang++-{version}" for version in range(22, 13, -1))]
    return next((path for name in names if (path := shutil.which(name))), None)


def replay() -> Path:
    """The program that runs files of the corpus, built with the ordinary compiler."""
    return compile_native("replay_decoders", SOURCES, ["-O1", "-g", "-DREPLAY", *SANITIZERS["address"]])


def fuzz(clang: str, seconds: int, scratch: Path) -> Found:
    """Fuzzes for a bounded time, from the corpus of the tree; what is found new stays in `scratch`."""
    flags = ["-O1", "-g", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"]
    program = compile_native("fuzz_decoders", SOURCES, flags, compiler=clang)
    fresh = scratch / "corpus"
    fresh.mkdir()
    command = [str(program), f"-max_total_time={seconds}", "-max_len=4096", "-timeout=10", "-print_final_stats=1"]
    command += [f"-artifact_prefix={scratch}/", str(fresh), str(CORPUS)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=seconds + 120)
    executed = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    crashes = len([*scratch.glob("crash-*"), *scratch.glob("timeout-*"), *scratch.glob("oom-*")])
    return Found(int(executed[1]) if executed else 0, crashes, done.stderr if done.returncode else "")
