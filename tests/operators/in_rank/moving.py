"""Copies of samples on the device, with the memory layout and the aliasing of the originals."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = "cuda"


def tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]


def clones(value: Any) -> Any:
    """Copies that no gradient flows through."""
    return tree_map(lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, value)


def copies(value: Any) -> Any:
    """Leaves of their own, that want gradients where `value` does."""

    def copy(v: Any) -> Any:
        return v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v

    return tree_map(copy, value)


def on_device(value: Any) -> Any:
    """`value` with every CPU tensor, device and generator replaced by one of the device.

    Tensors that share a storage share one there too, and keep strides and offset.
    """
    seen: dict[Any, Any] = {}
    return tree_map(lambda v: _moved(v, seen), value)


def _moved(value: Any, seen: dict[Any, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return _moved_tensor(value, seen)
    if isinstance(value, torch.device):
        return torch.device(DEVICE) if value.type == "cpu" else value
    if isinstance(value, str):
        return DEVICE if value == "cpu" else value
    if isinstance(value, torch.Generator):
        return torch.Generator(device=DEVICE).manual_seed(value.initial_seed())
    if isinstance(value, slice):
        return slice(*(_moved(part, seen) for part in (value.start, value.stop, value.step)))
    return value


def _moved_tensor(tensor: torch.Tensor, seen: dict[Any, Any]) -> torch.Tensor:
    if tensor.device.type != "cpu":
        return tensor
    if id(tensor) not in seen:
        plain = tensor.detach()
        if plain.layout != torch.strided or plain.is_quantized or plain.is_conj() or plain.is_neg():
            copy = plain.to(DEVICE)
        else:
            storage = plain.untyped_storage()
            key = (storage._cdata, plain.dtype)
            if key not in seen:
                whole = torch.empty(0, dtype=plain.dtype)
                seen[key] = whole.set_(storage, 0, (storage.nbytes() // plain.element_size(),), (1,)).to(DEVICE)
            copy = seen[key].as_strided(plain.size(), plain.stride(), plain.storage_offset())
        seen[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return seen[id(tensor)]
