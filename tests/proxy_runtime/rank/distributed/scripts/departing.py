"""departing.py HOW: rank 0 ends, or calls something else, in the middle of collectives; rank 1 waits for it."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

how, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("nccl")
numbers = torch.ones(10, device="cuda")
for _ in range(3):
    dist.all_reduce(numbers)
    numbers * 2  # known from here on: a new operation would wait for the device
torch.cuda.synchronize()
if rank == 0:
    if how == "end":
        sys.exit(0)
    if how == "exit_with_pending_work":
        dist.all_reduce(numbers, async_op=True)
        numbers * 2
        sys.exit(1)
    if how == "raise_with_pending_work":
        dist.all_reduce(numbers, async_op=True)
        numbers * 2
        raise ValueError("of the script")
    if how == "broadcast":
        dist.broadcast(numbers, 0)
    if how == "size":
        dist.all_reduce(torch.ones(4, device="cuda"))
    torch.cuda.synchronize()
elif how.endswith("pending_work"):
    received = torch.ones(3, device="cuda")
    dist.recv(received, 0)
    torch.cuda.synchronize()
else:
    dist.all_reduce(numbers)
    torch.cuda.synchronize()
