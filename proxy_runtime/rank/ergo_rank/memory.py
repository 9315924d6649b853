"""``torch.cuda`` memory figures: logical bytes of this rank, the same at every placement."""

from __future__ import annotations

from typing import Any

import torch

from ergo_rank import _interposer

__all__ = ["install"]

_COUNTED = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes")
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
        current, peak = mine["allocated"], mine["peak"]
        figures = {
            "current": current,
            "peak": peak,
            "allocated": mine["allocations"],
            "freed": mine["releases"],
        }
        none = dict.fromkeys(figures, 0)
        for name in _POOLED:
            counted = figures if name in _COUNTED else none
            stats[name] = {"all": dict(counted), "large_pool": dict(counted), "small_pool": dict(none)}
        for name in ("oversize_allocations", "oversize_segments"):
            stats[name] = dict(none)
        for name in ("num_alloc_retries", "num_ooms"):
            stats.setdefault(name, 0)
        return stats

    def reset_peak_memory_stats(device: Any = None) -> None:
        _interposer.reset_peak_memory()

    def raising_synchronize(device: Any = None) -> None:
        synchronize(device)  # checks the argument
        _interposer.synchronize()  # an error from the device may pass here, but not through CUDA's C interface

    for module in (torch.cuda, memory):
        module.memory_stats_as_nested_dict = memory_stats_as_nested_dict  # type: ignore[attr-defined]
        module.reset_peak_memory_stats = reset_peak_memory_stats  # type: ignore[attr-defined]
    torch.cuda.synchronize = raising_synchronize
