"""Writes `ergo` into the virtual environment that runs this.

An editable install would put the checkout on the path of every interpreter of the environment, ranks included,
where a user's own `events` or `cli` module must not meet ours. The launcher sets the path for itself alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

LAUNCHER = """#!{python}
import sys

sys.path.insert(0, {root!r})
from cli.main import main

if __name__ == "__main__":
    main()
"""


def main() -> None:
    """Writes the launcher beside the interpreter."""
    root = Path(__file__).resolve().parent.parent
    launcher = Path(sys.prefix) / "bin" / "ergo"
    launcher.write_text(LAUNCHER.format(python=Path(sys.prefix) / "bin" / "python", root=str(root)))
    launcher.chmod(0o755)


if __name__ == "__main__":
    main()
