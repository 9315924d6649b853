"""torch's precision and determinism flags: who sets one in the rank sets it on the device.

The interposer reads them all when one may have changed; what is here only notices that. Flags of a script take
effect in the order in which it sets them and issues operators.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ergo_rank import _interposer

__all__ = ["install"]

# Setters of torch._C after which a flag of channel/torch_flags.hpp may be another.
_SETTERS = (
    "_set_float32_matmul_precision",
    "_set_fp32_precision_setter",
    "_set_cublas_allow_tf32",
    "_set_cudnn_allow_tf32",
    "_set_onednn_allow_tf32",
    "_set_cudnn_enabled",
    "_set_cudnn_benchmark",
    "_cuda_set_cudnn_benchmark_limit",
    "_set_cudnn_deterministic",
    "_set_mkldnn_enabled",
    "_set_mkldnn_deterministic",
    "_set_nnpack_enabled",
    "_set_sdp_use_flash",
    "_set_sdp_use_mem_efficient",
    "_set_sdp_use_math",
    "_set_sdp_use_cudnn",
    "_set_sdp_use_overrideable",
    "_set_sdp_priority_order",
    "_set_math_sdp_allow_fp16_bf16_reduction",
    "_set_linalg_preferred_backend",
    "_set_blas_preferred_backend",
    "_set_cublas_allow_fp16_reduced_precision_reduction",
    "_set_cublas_allow_bf16_reduced_precision_reduction",
    "_set_cublas_allow_fp16_accumulation",
    "_set_cpu_allow_fp16_reduced_precision_reduction",
    "_set_deterministic_fill_uninitialized_memory",
)


def install(kind: str) -> None:
    """Watches the setters of torch's flags.

    Args:
        kind: of the device, ``cpu`` or ``cuda``.
    """
    replaced: dict[Any, Any] = {}
    for name in _SETTERS:
        native = getattr(torch._C, name, None)
        if native is not None:
            replaced[native] = _watched(native)
            setattr(torch._C, name, replaced[native])
    if kind == "cpu":
        replaced |= _keep_cudnn_out()
        _forward_threads()
    for prop in _properties():
        prop.getter = replaced.get(prop.getter, prop.getter)
        prop.setter = replaced.get(prop.setter, prop.setter)


def _watched(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def setter(*args: Any, **kwargs: Any) -> Any:
        try:
            return native(*args, **kwargs)
        finally:
            _interposer.touch_flags()

    return setter


def _properties() -> Iterator[Any]:
    """The properties of ``torch.backends.*``, which hold getters and setters of their own."""
    from torch.backends import ContextProp

    for name, module in list(sys.modules.items()):
        if name.startswith("torch.backends."):
            for value in vars(type(module)).values():
                if isinstance(value, ContextProp):
                    yield value


def _keep_cudnn_out() -> dict[Any, Any]:
    """Composites choose cuDNN's kernels, which no CPU has, while its flag is on: a script only sees what it set."""
    original_get, original_set = torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled
    native = getattr(original_set, "__wrapped__", original_set)
    native(False)
    wanted = True

    def set_enabled(value: bool) -> None:
        nonlocal wanted
        if not isinstance(value, bool):
            raise TypeError(f"set_enabled_cudnn expects a bool, but got {type(value).__name__}")
        wanted = value

    def get_enabled() -> bool:
        return wanted

    torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled = get_enabled, set_enabled
    cudnn: Any = torch.backends.cudnn
    for module in (cudnn, getattr(cudnn, "m", cudnn)):
        module.is_acceptable = _is_acceptable
    return {original_get: get_enabled, native: set_enabled}


def _is_acceptable(tensor: torch.Tensor) -> bool:
    return False


def _forward_threads() -> None:
    """The bits of some CPU kernels depend on the number of threads: a script that sets it sets the device's too."""
    set_threads, set_flush = torch.set_num_threads, torch.set_flush_denormal

    @functools.wraps(set_threads)
    def set_num_threads(n: int) -> None:
        set_threads(n)
        _interposer.set_threads(torch.get_num_threads())

    @functools.wraps(set_flush)
    def set_flush_denormal(mode: bool) -> bool:
        supported = set_flush(mode)
        if supported:
            _interposer.set_flush_denormal(mode)
        return supported

    torch.set_num_threads, torch.set_flush_denormal = set_num_threads, set_flush_denormal
