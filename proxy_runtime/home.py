"""Where Ergosphere keeps what it makes on a machine: builds, a private CRIU, runs, checkpoints."""

from __future__ import annotations

import os
from pathlib import Path


def ergo_home() -> Path:
    """`$ERGO_HOME`, by default ~/.local/state/ergosphere; absolute, because the processes of a job start elsewhere."""
    return Path(os.environ.get("ERGO_HOME") or "~/.local/state/ergosphere").expanduser().absolute()
