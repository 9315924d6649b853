"""The device module under a sanitizer: our half of a process whose other half, torch, nobody watches."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from proxy_runtime.building.interpreter import query
from proxy_runtime.building.native import NativeBuild, Target, find_compiler
from proxy_runtime.building.sources import Sources
from proxy_runtime.rank.stubs import generate, wheel
from tests.native.build import SANITIZERS, cache_folder

# Of torch's classes the type information is hidden.
_FLAGS = ("-O1", *SANITIZERS["address"], "-fno-sanitize=vptr")
_RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so.6")  # Python itself is linked with none of them


class _Watched(NativeBuild):
    def _command(self, source: Path, target: Target) -> list[str]:
        return [*super()._command(source, target), *_FLAGS]

    def _precompiled(self, *, make: bool) -> Path | None:
        return None  # made with other flags

    def _link(self, target: Target, objects: Sequence[Path], output: Path) -> None:
        torch = (f"-L{self._interpreter.torch / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10")
        command = [self._compiler.path, "-shared", *_FLAGS, *map(str, objects), *torch, "-o", str(output)]
        self._run(command, target.output)


def build(folder: Path) -> None:
    """Puts ``_ergo_device.so`` into `folder`. Object files are kept; the first time takes minutes."""
    interpreter, sources = query(sys.executable), Sources.of_this_tree()
    native = _Watched(
        interpreter,
        find_compiler(),
        root=sources.root,
        includes=(*wheel.inspect(interpreter.torch, interpreter.path).includes, generate.HEADERS),
        cache=cache_folder() / "objects",
        jobs=2,
        strict=False,
        report=print,
    )
    native.compile([Target("_ergo_device", sources.device, "_ergo_device.so")], folder)


def environment() -> dict[str, str]:
    """For a Python that loads the module. Containers that torch has grown are unknown to the sanitizer."""

    def found(name: str) -> str:
        command = [find_compiler().path, f"-print-file-name={name}"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return {
        "LD_PRELOAD": ":".join(map(found, _RUNTIMES)),
        "ASAN_OPTIONS": "detect_leaks=0:detect_container_overflow=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
