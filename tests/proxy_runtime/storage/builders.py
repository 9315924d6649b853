"""Builders for tests of the fleet's store."""

from __future__ import annotations

import os
from pathlib import Path

from model.ids import NodeId, Step
from model.manifest import HostClass, ManifestHeader, NumericsClass, RankState
from model.records import NodeRecord
from model.runtime import NodeParts
from proxy_runtime.checkpoint import Part, Store, WrittenParts

SECRET = bytes(range(32))
NUMERICS = NumericsClass(torch="2.15.0", device_model="cpu", instruction_set="AVX2", threads_per_device=1)


def make_header(world_size: int = 1, step: int = 0) -> ManifestHeader:
    return ManifestHeader(
        world_size=world_size,
        placement=("cpu:0",) * world_size,
        argv=("python", "train.py"),
        cwd="/job",
        build_id="build-1",
        numerics=NUMERICS,
        host=HostClass(cpu_features=("avx",), kernel_release="6.18.0"),
        created_at_ns=1_700_000_000_000_000_000 + step,
        ranks=tuple(RankState(rank=r, step=Step(step)) for r in range(world_size)),
    )


def write_parts(
    store: Store,
    node: str,
    ranks: dict[int, bytes],
    *,
    volume: Path | None = None,
    job: str = "job",
    epoch: int = 1,
) -> tuple[NodeParts, WrittenParts]:
    """Writes the parts of some ranks, given by the content of their device dump."""
    with store.begin(job, epoch) as writer:
        for rank, content in ranks.items():
            writer.add_bytes(Part.device(rank), "storages", content)
        if volume is not None:
            writer.add_tree(Part.volume(), volume)
        written = writer.finish_parts()
    states = tuple(RankState(rank=r, step=Step(0)) for r in ranks)
    return NodeParts(NodeId(node, 1), written.ranks, states, written.volume), written


def noise(size: int) -> bytes:
    return os.urandom(size)


def node_record(name: str = "n", address: str = "127.0.0.1:1") -> NodeRecord:
    return NodeRecord(
        node=NodeId(name, 1), cluster="local", boot_id="boot", address=address, devices=(), numerics=NUMERICS
    )
