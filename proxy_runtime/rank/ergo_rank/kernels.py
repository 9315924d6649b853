"""Kernels that are compiled in a process: they would run on a device that this process does not have."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch

__all__ = ["install"]

_TRITON = "triton.runtime.jit"


def install(kind: str) -> None:
    """Refuses Triton launches, and keeps torch from choosing kernels that are compiled here.

    Args:
        kind: of the device, ``cpu`` or ``cuda``.
    """
    # TorchScript would compile CUDA source for chains of operators; they are forwarded one by one instead.
    torch._C._jit_override_can_fuse_on_gpu(False)
    if kind == "cpu":
        # What Python code of torch asks before it calls an attention kernel that only a GPU has.
        for name in ("can_use_flash_attention", "can_use_efficient_attention", "can_use_cudnn_attention"):
            if hasattr(torch.backends.cuda, name):
                setattr(torch.backends.cuda, name, _cannot_use)
    if _TRITON in sys.modules:
        _guard(sys.modules[_TRITON])
    else:
        sys.meta_path.insert(0, _TritonFinder())


def _cannot_use(params: object, debug: bool = False) -> bool:
    """The answer of a device that has no such kernel."""
    return False


def _guard(module: ModuleType) -> None:
    def run(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        name = getattr(self, "__name__", "without a name")
        raise RuntimeError(
            f"The Triton kernel {name} cannot be launched on an Ergosphere device: CUDA memory is in the "
            "device proxy, not in this process. Use torch operators instead."
        )

    module.JITFunction.run = run


class _TritonFinder(MetaPathFinder):
    """Waits for Triton to be imported, which takes long and is mostly not needed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TRITON:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_guard(module: ModuleType) -> None:
            execute(module)
            _guard(module)

        spec.loader.exec_module = execute_and_guard  # type: ignore[method-assign]
        return spec
