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
    if how == "recv":
        dist.recv(numbers, 1)
    if how == "broadcast_size":
        dist.broadcast(numbers, 0)
    if how == "recv_size":
        dist.send(numbers, 1)
    if how == "gather_size":
        dist.all_gather([torch.ones(10, device="cuda") for _ in range(2)], numbers)
    if how == "store":
        sys.exit(0)
    if how == "size":
        dist.all_reduce(torch.ones(4, device="cuda"))
    torch.cuda.synchronize()
elif how.endswith("pending_work"):
    received = torch.ones(3, device="cuda")
    dist.recv(received, 0)
    torch.cuda.synchronize()
elif how == "broadcast_size":
    dist.broadcast(torch.ones(4, device="cuda"), 0)
    torch.cuda.synchronize()
elif how == "recv_size":
    dist.recv(torch.ones(4, device="cuda"), 0)
    torch.cuda.synchronize()
elif how == "gather_size":
    dist.all_gather([torch.ones(40, device="cuda") for _ in range(2)], torch.ones(40, device="cuda"))
    torch.cuda.synchronize()
elif how == "store":
    dist.distributed_c10d._get_default_store().get("of rank 0")
else:
    dist.all_reduce(numbers)
    torch.cuda.synchronize()
