"""What commands have asked of jobs, as JSON lines in the local fleet's folder of logs: where a job's trace begins."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import orjson


def note(fleet_dir: Path, job: str, event: str, *, level: str = "info", **more: object) -> None:
    """Appends a line to `logs/cli.log`; where there is no local fleet, or no room, nothing is written."""
    when = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line = {"time": when, "level": level, "event": event, "job": job, **more, "pid": os.getpid(), "process": "cli"}
    with suppress(OSError):
        descriptor = os.open(fleet_dir / "logs" / "cli.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, orjson.dumps(line, default=str) + b"\n")
        finally:
            os.close(descriptor)
