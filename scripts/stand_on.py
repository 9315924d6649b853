"""Lets the virtual environment that this runs in find the packages of another one behind its own.

usage: ENVIRONMENT/bin/python stand_on.py OTHER
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

NAME = "stands-on.pth"


def main() -> None:
    """Writes a path file into this environment's packages."""
    own = Path(sysconfig.get_path("purelib"))
    other = Path(sys.argv[1]).absolute() / own.relative_to(sys.prefix)
    if not other.is_dir():
        raise SystemExit(f"{other} is not there: {sys.argv[1]} is no environment of this Python.")
    (own / NAME).write_text(f"{other}\n")


if __name__ == "__main__":
    main()
