"""What a script of this folder prints of a value, and the device that it runs on (`--native`: the CPU)."""

import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

DEVICE = "cpu" if "--native" in sys.argv else "cuda"
torch.set_num_threads(1)  # products depend on how many


def digest(value: Any) -> str:
    """Of layout, sizes, dtype, coalesced flag and bits."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    value = value.detach()
    if value.is_nested and value.layout == torch.strided:
        return f"nested {' '.join(digest(part) for part in value.unbind())}"
    if value.layout != torch.strided:
        flat, shape = value.cpu(), tuple(value.shape)
        if value.layout == torch.sparse_coo:
            parts = [flat._indices(), flat._values()]
            return f"sparse {shape} {value.sparse_dim()} {value.is_coalesced()} {' '.join(map(digest, parts))}"
        if value.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = [flat.crow_indices(), flat.col_indices(), flat.values()]
        else:
            parts = [flat.ccol_indices(), flat.row_indices(), flat.values()]
        return f"{value.layout} {shape} {' '.join(map(digest, parts))}"
    assert value.device.type in (DEVICE, "cpu")
    plain = value.cpu().reshape(-1).contiguous()
    data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return f"{tuple(value.shape)} {plain.dtype} {hashlib.sha256(data).hexdigest()[:12]}"


def write(*parts: Callable[[], Iterator[Any]]) -> None:
    """A line for every value that `parts` yield."""
    for part in parts:
        for n, values in enumerate(part()):
            for m, value in enumerate(values if isinstance(values, tuple) else (values,)):
                print(f"{part.__name__} {n}.{m}: {digest(value)}")
