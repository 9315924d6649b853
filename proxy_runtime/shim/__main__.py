"""Main of a shim: `python -m proxy_runtime.shim RUN_DIRECTORY`."""

import sys
from pathlib import Path

from proxy_runtime.shim.server import run

run(Path(sys.argv[1]))
