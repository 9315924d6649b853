"""Compiles the minimal pid 1 (`init.c`)."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from proxy_runtime.process.namespace import ContainerError

SOURCE = Path(__file__).with_name("init.c")
_FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror")


def build_init(target: Path, *, compiler: str = "gcc") -> Path:
    """Compiles `init.c` to `target`, which appears complete or not at all.

    Static where the machine has a static C library, so that what a job puts into its environment
    (`LD_PRELOAD`) does not reach pid 1.

    Raises:
        ContainerError: `container.no-compiler`, or `container.build` with what the compiler said.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".init-") as scratch:
        binary = Path(scratch) / "init"
        for extra in (("-static",), ()):
            command = [compiler, *_FLAGS, *extra, str(SOURCE), "-o", str(binary)]
            try:
                result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            except FileNotFoundError:
                raise ContainerError(
                    f"the C compiler {compiler} is not installed.",
                    code="container.no-compiler",
                    remedy="Install gcc and the C library's headers (build-essential).",
                ) from None
            if result.returncode == 0:
                os.replace(binary, target)
                return target
    raise ContainerError(
        f"{SOURCE.name} does not compile: {result.stderr.strip()[-500:]}",
        code="container.build",
        remedy="Install gcc and the C library's headers (build-essential).",
    )
