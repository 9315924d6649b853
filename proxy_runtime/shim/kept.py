"""What the shim and the device proxies of a part have logged, kept when its run directory goes.

One file a node, JSON lines with the job's id on every one, so that a job can be followed after it has moved or ended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import orjson

from proxy_runtime.shim.layout import RunLayout

LONGEST = 1 << 20
"""Bytes that are kept of one file: its end."""

ROTATED_AT = 16 << 20
"""Bytes after which a new log begins; the one before is kept."""

_lock = threading.Lock()


def keep(layout: RunLayout) -> None:
    """Appends the logs of a part, whose processes are gone, to the node's.

    Raises:
        OSError: it cannot be written.
    """
    lines = b"".join(_lines(layout))
    if not lines:
        return
    path = layout.kept_log
    with _lock:
        if path.exists() and path.stat().st_size > ROTATED_AT:
            path.rename(path.with_suffix(".log.1"))
        with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(lines)


def _lines(layout: RunLayout) -> Iterator[bytes]:
    epoch = layout.root.name.rpartition("-e")[2]
    ids = {"job": layout.job_id, "epoch": int(epoch) if epoch.isdecimal() else None}
    proxies = sorted(layout.root.glob("e*/proxy-*.log"))
    for path in (layout.events, layout.shim_log, layout.root / "zygote.log", *proxies):
        process = {"events": "shim", "shim": "shim", "zygote": "zygote"}.get(path.stem, "device-proxy")
        for line in _end(path):
            if not line.startswith(b'{"time":'):  # a traceback, or what a library has printed
                words = line.decode(errors="replace")
                line = orjson.dumps({"level": "error", "event": words, **ids, "process": process, "log": path.name})
            yield line + b"\n"


def _end(path: Path) -> list[bytes]:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LONGEST))
            return [line for line in file.read().splitlines() if line.strip()]
    except OSError:
        return []  # it was never written
