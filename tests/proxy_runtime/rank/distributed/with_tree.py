"""with_tree.py SCRIPT [ARGUMENTS]...: runs a script with the sums of our tree in torch's own collectives."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))
from tests.support.tree_gloo import install

install()
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
runpy.run_path(sys.argv[0], run_name="__main__")
