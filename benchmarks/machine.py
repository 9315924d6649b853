"""On what a figure was measured: machine, versions, source. No host name and no path, so that records can be shared."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_INSTRUCTION_SETS = ("avx2", "avx512f", "amx_tile", "asimd", "sve")


def describe_machine() -> dict[str, Any]:
    """Processor, cores usable by this process, memory in GiB, kernel, and the load of the last minute."""
    fields = _first_processor()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "processor": fields.get("model name", platform.machine()),
        "instruction_sets": [name for name in _INSTRUCTION_SETS if name in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),
    }


def describe_versions() -> dict[str, str]:
    """Versions of Python, torch and this source tree (commit, with ``-dirty`` where it has changes)."""
    return {
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "ergosphere": _git("describe", "--always", "--dirty", "--abbrev=12"),
    }


def _first_processor() -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if not line.strip():
            break
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return fields


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
