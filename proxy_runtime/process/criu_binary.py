"""One CRIU program: what it is, and whether its version can work with the running kernel."""

from __future__ import annotations

import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from proxy_runtime.process.criu_errors import CriuError

Version = tuple[int, int, int]

_OLDEST_ANYWHERE: Final[Version] = (4, 0, 0)
# (kernel from, CRIU needed there): vDSO layout, then inet socket options.
_NEEDED: Final[tuple[tuple[tuple[int, int], Version], ...]] = (((6, 16), (4, 2, 0)), ((6, 13), (4, 1, 0)))


@dataclass(frozen=True, slots=True)
class Criu:
    """A CRIU to use.

    Attributes:
        path: the program.
        version: as it says itself.
        prefix: the private prefix that it lies in, or None for one of the machine's own.
    """

    path: Path
    version: Version
    prefix: Path | None = None

    @property
    def version_text(self) -> str:
        """The version as text."""
        return ".".join(str(part) for part in self.version)


def probe(path: Path, prefix: Path | None = None) -> Criu | None:
    """Runs `criu --version`; None when that does not work."""
    try:
        result = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"Version:\s*(\d+)\.(\d+)(?:\.(\d+))?", result.stdout)
    if result.returncode != 0 or match is None:
        return None
    return Criu(path, (int(match[1]), int(match[2]), int(match[3] or 0)), prefix)


def kernel_version(release: str | None = None) -> tuple[int, int]:
    """(major, minor) of a kernel release, by default the running one's."""
    match = re.match(r"(\d+)\.(\d+)", release or platform.release())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def needed_version(kernel: tuple[int, int] | None = None) -> Version:
    """The oldest CRIU that works on a kernel, by default the running one."""
    running = kernel or kernel_version()
    return next((criu for since, criu in _NEEDED if running >= since), _OLDEST_ANYWHERE)


def require_recent(criu: Criu) -> None:
    """Raises CriuError `criu.too-old` where the version is known not to work with the running kernel."""
    needed = needed_version()
    if criu.version < needed:
        raise CriuError(
            f"CRIU {criu.version_text} at {criu.path} is too old for kernel {platform.release()}, "
            f"which needs {'.'.join(map(str, needed))}.",
            code="criu.too-old",
            remedy="Unset ERGO_CRIU or install a newer one.",
        )
