"""Random generators of the device: torch's class makes ours for ``cuda``."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import Generator as _NativeGenerator

from ergo_rank import _interposer

__all__ = ["install", "install_later"]


class _GeneratorType(type):
    """Whatever is a generator for torch stays one for ``isinstance``."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _NativeGenerator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _NativeGenerator)


class Generator(metaclass=_GeneratorType):
    """``torch.Generator``, except that a generator of the device is one of the device proxy."""

    def __new__(cls, device: Any = "cpu") -> Any:
        wanted = torch.device(device)
        if wanted.type != "cuda":
            return _NativeGenerator(device=wanted)
        if wanted.index is not None:
            with torch.cuda.device(wanted):  # raises what CUDA raises for a device that is not there
                pass
            _interposer.use_device(wanted.index)
        return _interposer.new_generator()


Generator.__module__ = "torch"
Generator.__qualname__ = "Generator"


def install(devices: int) -> None:
    """Gives each device one default generator, and ``torch.Generator(device="cuda")`` a state in the proxy."""
    torch.cuda.default_generators = tuple(_interposer.default_generator(index) for index in range(devices))
    torch.Generator = Generator  # type: ignore[misc, assignment]


def install_later() -> None:
    """The same for a process that may never use a device: once torch initialises CUDA, before it seeds anything."""
    torch.Generator = Generator  # type: ignore[misc, assignment]
    torch.cuda._lazy_call(lambda: install(torch.cuda.device_count()))
