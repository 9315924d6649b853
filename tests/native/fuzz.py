"""Building and running the fuzzers of the decoders: libFuzzer, of clang."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.native.build import HERE, NATIVE, RANK_NATIVE, SANITIZERS, compile_native

_OPTIONS = ["-O1", "-g"]


@dataclass(frozen=True, slots=True)
class Found:
    """What a run of the fuzzer found; `report` is its output where it crashed."""

    executions: int
    crashes: int
    report: str


@dataclass(frozen=True, slots=True)
class Target:
    """A program that decodes what it is given.

    Attributes:
        name: of its source file `fuzz_NAME.cpp` and of its corpus.
        sources: what is decoded with.
        torch: it needs torch, whose own code no sanitizer watches.
    """

    name: str
    sources: tuple[Path, ...]
    torch: bool = False

    @property
    def corpus(self) -> Path:
        return HERE / "corpus" / self.name

    def environment(self) -> dict[str, str]:
        """Containers that torch's code has grown are unknown to the sanitizer; and it never frees its registries."""
        options = {"ASAN_OPTIONS": "detect_container_overflow=0:detect_leaks=0"} if self.torch else {}
        return os.environ | options

    def replay(self) -> Path:
        """The program that runs files of the corpus, built with the ordinary compiler."""
        return self._build(f"replay_{self.name}", SANITIZERS["address"], None, HERE / "replay.cpp")

    def fuzz(self, clang: str, seconds: int, scratch: Path) -> Found:
        """Fuzzes for a bounded time, from the corpus of the tree; what is found new stays in `scratch`."""
        flags = ["-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all", "-fno-sanitize=vptr"]
        program = self._build(f"fuzz_{self.name}", flags, clang)
        fresh = scratch / self.name
        fresh.mkdir()
        command = [str(program), f"-max_total_time={seconds}", "-max_len=4096", "-timeout=10", "-print_final_stats=1"]
        command += [f"-artifact_prefix={fresh}-", str(fresh), str(self.corpus)]
        done = subprocess.run(
            command,
            env=self.environment(),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds + 120,
        )
        executed = re.search(r"number_of_executed_units: (\d+)", done.stderr)
        kinds = ("crash", "timeout", "oom", "leak")
        crashes = sum(len([*scratch.glob(f"{self.name}-{kind}-*")]) for kind in kinds)
        return Found(int(executed[1]) if executed else 0, crashes, done.stderr if done.returncode else "")

    def _build(self, name: str, flags: list[str], compiler: str | None, *more: Path) -> Path:
        if self.torch:
            flags = [*_torch_flags(), *flags]
        sources = [HERE / f"fuzz_{self.name}.cpp", *self.sources, *more]
        return compile_native(name, sources, [*_OPTIONS, *flags], compiler)


TARGETS = (
    Target(
        "decoders",
        tuple(NATIVE / f"{name}.cpp" for name in ("ring_consumer", "fabric", "board", "streams", "store")),
    ),
    Target(
        "messages",
        (
            *(NATIVE / f"{name}.cpp" for name in ("template", "value", "storage", "libraries", "state_file")),
            NATIVE / "splice" / "ledger.cpp",
            RANK_NATIVE / "output_spec.cpp",
        ),
        torch=True,
    ),
)


def find_clang() -> str | None:
    """A clang++ on the path, the plain one first."""
    names = ["clang++", *(f"clang++-{version}" for version in range(22, 13, -1))]
    return next((path for name in names if (path := shutil.which(name))), None)


def _torch_flags() -> list[str]:
    import torch

    root = Path(torch.__file__).parent
    return [
        *("-isystem", str(root / "include"), "-Wno-unused-command-line-argument"),
        *(f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"),
    ]
