"""rpc.py: an RPC agent is refused with a sentence, however it is reached."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.rpc import init_rpc

dist.init_process_group("nccl")
for call in (rpc.init_rpc, init_rpc):
    try:
        call("worker", rank=0, world_size=1)
    except RuntimeError as error:
        print(error)
