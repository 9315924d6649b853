"""``torch.cuda`` memory figures: logical bytes of this rank, the same at every placement."""

from __future__ import annotations

from typing import Any

import torch

from ergo_rank import _interposer

__all__ = ["install"]

_COUNTED = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes")
_STORAGES = ("allocation", "active")
# Every figure that torch.cuda.memory_summary() prints; a rank has no pools, segments or splits of its own.
_POOLED = (*_COUNTED, "inactive_split_bytes", "allocation", "active", "segment", "inactive_split")


def install() -> None:
    """Answers memory statistics from the rank's own accounts."""
    memory = torch.cuda.memory
    native = memory.memory_stats_as_nested_dict
    synchronize = torch.cuda.synchronize

    def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
        stats: dict[str, Any] = dict(native(device))
        mine = _interposer.memory_stats()
        figures = {
            "current": mine["allocated"],
            "peak": mine["peak"],
            "allocated": mine["allocated_ever"],
            "freed": mine["released_ever"],
        }
        storages = {
            "current": mine["allocations"] - mine["releases"],
            "peak": mine["peak_count"],
            "allocated": mine["allocations"],
            "freed": mine["releases"],
        }
        none = dict.fromkeys(figures, 0)
        for name in _POOLED:
            counted = figures if name in _COUNTED else storages if name in _STORAGES else none
            stats[name] = {"all": dict(counted), "large_pool": dict(counted), "small_pool": dict(none)}
        for name in ("oversize_allocations", "oversize_segments"):
            stats[name] = dict(none)
        stats["num_alloc_retries"], stats["num_ooms"] = 0, mine["failures"]
        return stats

    def reset_peak_memory_stats(device: Any = None) -> None:
        _index(device)
        _interposer.reset_peak_memory()

    def reset_accumulated_memory_stats(device: Any = None) -> None:
        _index(device)
        _interposer.reset_accumulated_memory()

    def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
        _index(device)
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        _interposer.set_memory_fraction(fraction)

    def get_per_process_memory_fraction(device: Any = None) -> float:
        _index(device)
        return _interposer.memory_fraction()

    def raising_synchronize(device: Any = None) -> None:
        _index(device)
        _interposer.synchronize()  # an error from the device is raised here with its own text
        synchronize(device)

    for function in (
        memory_stats_as_nested_dict,
        reset_peak_memory_stats,
        reset_accumulated_memory_stats,
        set_per_process_memory_fraction,
        get_per_process_memory_fraction,
    ):
        for module in (torch.cuda, memory):
            if hasattr(module, function.__name__):
                setattr(module, function.__name__, function)
    torch.cuda.synchronize = raising_synchronize
    _install_accelerator(memory_stats_as_nested_dict, reset_peak_memory_stats, reset_accumulated_memory_stats)


def _install_accelerator(stats: Any, reset_peak: Any, reset_accumulated: Any) -> None:
    """``torch.accelerator`` asks torch's caching allocator for the same figures; a rank has none."""
    for name, function in {
        "isAllocatorInitialized": lambda: True,
        "emptyCache": lambda: None,
        "getDeviceStats": stats,
        "resetPeakStats": reset_peak,
        "resetAccumulatedStats": reset_accumulated,
        "getMemoryInfo": torch.cuda.mem_get_info,
    }.items():
        if hasattr(torch._C, f"_accelerator_{name}"):
            setattr(torch._C, f"_accelerator_{name}", function)


def _index(device: Any) -> None:
    """Raises what CUDA raises for a device that is not there."""
    if device is not None:
        with torch.cuda.device(device):
            pass
