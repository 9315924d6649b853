"""How much memory a fleet takes: proportional set sizes of all of its processes, summed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil

PERIOD_S = 1.0


def fleet_bytes(directory: Path) -> int:
    """Proportional set size of all processes with `directory` in command line or environment, and of their children.

    Shared pages are counted once over all who map them; page cache is not counted.
    """
    own = str(directory)
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if own in " ".join(process.cmdline()) or process.environ().get("ERGO_FLEET_DIR") == own:
                for one in (process, *process.children(recursive=True)):
                    found[one.pid] = one
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    total = 0
    for process in found.values():
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


class PeakMemory:
    """Samples a fleet's memory about once a second."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.peak_bytes = 0

    async def watch(self) -> None:
        """Samples until cancelled."""
        while True:
            self.peak_bytes = max(self.peak_bytes, await asyncio.to_thread(fleet_bytes, self._directory))
            await asyncio.sleep(PERIOD_S)
