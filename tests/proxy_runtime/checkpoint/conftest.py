"""Builders for the checkpoint store's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model.ids import Step
from model.manifest import HostClass, ManifestHeader, NumericsClass, RankState
from proxy_runtime.checkpoint import Store


def _header(world_size: int = 1, step: int = 0, **fields: Any) -> ManifestHeader:
    values: dict[str, Any] = {
        "world_size": world_size,
        "placement": ("cpu:0",) * world_size,
        "argv": ("python", "train.py"),
        "cwd": "/job",
        "build_id": "build-1",
        "numerics": NumericsClass(torch="2.15.0", device_model="cpu", instruction_set="AVX2", threads_per_device=1),
        "host": HostClass(cpu_features=("avx", "avx2"), kernel_release="6.18.0"),
        "created_at_ns": 1_700_000_000_000_000_000 + step,
        "ranks": tuple(RankState(rank=r, step=Step(step)) for r in range(world_size)),
    }
    return ManifestHeader(**{**values, **fields})


@pytest.fixture(scope="session")
def make_header() -> Callable[..., ManifestHeader]:
    """A header of ``world_size`` ranks at ``step``; any field may be given."""
    return _header


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store.open(tmp_path / "store")
