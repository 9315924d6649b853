"""Runs a script natively with every DistributedDataParallel reducing along our tree.

torchrun --nproc-per-node 4 tests/support/with_tree.py SCRIPT [ARGUMENTS]...
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import torch.nn.parallel

sys.path.insert(0, str(Path(__file__).parent))
import tree_ddp


class TreeDDP(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tree_ddp.register_tree_hook(self)


torch.nn.parallel.DistributedDataParallel = TreeDDP
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
runpy.run_path(sys.argv[0], run_name="__main__")
