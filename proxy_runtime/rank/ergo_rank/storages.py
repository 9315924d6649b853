"""Untyped storages of the device, which torch makes and resizes without its dispatcher."""

from __future__ import annotations

from typing import Any

import torch

from ergo_rank import _interposer

__all__ = ["install"]


def install() -> None:
    """Lets ``torch.UntypedStorage(..., device="cuda")`` and ``storage.resize_`` work on the device proxy."""
    untyped = torch.UntypedStorage
    make = untyped.__new__
    resize = untyped.resize_

    def new(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(cls, *args, **kwargs) if device is None else make(cls, *args, device=device, **kwargs)
        size_or_sequence = args[0] if args else 0
        if isinstance(size_or_sequence, int):
            return torch.empty(size_or_sequence, dtype=torch.uint8, device="cuda").untyped_storage()
        return torch.tensor(list(size_or_sequence), dtype=torch.uint8, device="cuda").untyped_storage()

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize(self, size)
        view = torch.empty(0, dtype=torch.uint8, device="cuda")
        view.set_(self, 0, (0,), (1,))
        _interposer.resize_storage(view, size)
        return self

    untyped.__new__ = staticmethod(new)  # type: ignore[method-assign, assignment]
    untyped.resize_ = resize_  # type: ignore[method-assign, assignment]
