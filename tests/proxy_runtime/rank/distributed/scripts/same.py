"""What the scripts of this folder share: they run natively over gloo and as ranks over `nccl`, and print the same.

Every case prints one line: its name and a digest of what it made, or the kind of exception that it raised.
"""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ON_DEVICE = torch.cuda.is_available()
KIND = "cuda" if ON_DEVICE else "cpu"
DEVICE = torch.device(KIND)
BACKEND = "nccl" if ON_DEVICE else "gloo"
torch.set_num_threads(1)


def digest(*tensors: torch.Tensor) -> str:
    """A hash of dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        host = whole.detach().cpu().contiguous()
        total.update(f"{host.dtype} {tuple(host.shape)}".encode())
        if host.numel():
            total.update(host.view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
    """Numbers of this rank; magnitudes differ, so that another order of a sum gives other bits."""
    generator = torch.Generator().manual_seed(1000 * seed + RANK)
    if dtype == torch.bool:
        made = torch.randint(0, 2, shape, generator=generator).bool()
    elif dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        made = torch.randn(shape, generator=generator, dtype=wide)
        made = (made * 10.0 ** torch.randint(-2, 3, shape, generator=generator)).to(dtype)
    else:
        made = torch.randint(-5 if dtype.is_signed else 0, 9, shape, generator=generator).to(dtype)
    return made.to(DEVICE if device is None else device)


def common(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers that all ranks have."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def case(function: Callable[[], object]) -> Callable[[], object]:
    """Runs a case at once."""
    try:
        made = function()
        print(function.__name__, "done" if made is None else made, flush=True)
    except Exception as error:
        print(function.__name__, "raised", type(error).__name__, flush=True)
        traceback.print_exc(file=sys.stderr)
    return function


def begin(**arguments: Any) -> None:
    dist.init_process_group(BACKEND, **arguments)


def end() -> None:
    dist.barrier()
    dist.destroy_process_group()
    print("end")
