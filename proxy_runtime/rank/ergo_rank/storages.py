"""Untyped storages of the device, which torch makes and resizes without its dispatcher."""

from __future__ import annotations

from typing import Any

import torch

from ergo_rank import _interposer

__all__ = ["install"]


def install() -> None:
    """Lets device storages be made, resized, written to files and read back."""
    untyped = torch.UntypedStorage
    make: Any = untyped.__new__
    resize = untyped.resize_

    def new(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(cls, *args, **kwargs) if device is None else make(cls, *args, device=device, **kwargs)
        size_or_sequence = args[0] if args else 0
        if isinstance(size_or_sequence, int):
            return torch.empty(size_or_sequence, dtype=torch.uint8, device=device).untyped_storage()
        return torch.tensor(list(size_or_sequence), dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize(self, size)
        view = torch.empty(0, dtype=torch.uint8, device="cuda")
        view.set_(self, 0, (0,), (1,))
        _interposer.resize_storage(view, size)
        return self

    write, read = untyped._write_file, untyped._set_from_file

    # torch's own pass the device address on as if it were memory that any tensor may wrap.
    def _write_file(self: torch.UntypedStorage, *args: Any) -> Any:
        return write(self if self.device.type != "cuda" else self.cpu(), *args)

    def _set_from_file(self: torch.UntypedStorage, *args: Any) -> Any:
        if self.device.type != "cuda":
            return read(self, *args)
        staged = make(torch.UntypedStorage, self.nbytes())
        read(staged, *args)
        self.copy_(staged)
        return self

    untyped._write_file = _write_file  # type: ignore[method-assign, assignment]
    untyped._set_from_file = _set_from_file  # type: ignore[method-assign, assignment]
    untyped.__new__ = staticmethod(new)  # type: ignore[method-assign, assignment]
    untyped.resize_ = resize_  # type: ignore[method-assign, assignment]
