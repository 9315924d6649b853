"""All-reduces of one size, again and again: on the device through `nccl`, natively on the CPU through `gloo`."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from _serving import serve

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)
dist.init_process_group("nccl" if _DEVICE == "cuda" else "gloo")
_tensors: dict[int, torch.Tensor] = {}


def _wait() -> None:
    if _DEVICE == "cuda":
        torch.cuda.synchronize()


def reduce(size: int, count: int) -> dict[str, Any]:
    """Seconds that `count` all-reduces of `size` bytes of float32 took, one after another, to the last result."""
    if size not in _tensors:
        # Zeros stay zeros: no denormal or infinite value makes one side slower.
        _tensors[size] = torch.zeros(size // 4, device=_DEVICE)
    tensor = _tensors[size]
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(tensor)
    _wait()
    return {"seconds": time.perf_counter() - began}


def right(size: int) -> dict[str, Any]:
    """Whether the sum of what every rank gives is the sum."""
    tensor = torch.arange(size // 4, device=_DEVICE) * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    world = dist.get_world_size()
    wanted = torch.arange(size // 4) * (world * (world + 1) // 2)
    return {"equal": torch.equal(tensor.cpu(), wanted)}


serve({"reduce": reduce, "right": right})
