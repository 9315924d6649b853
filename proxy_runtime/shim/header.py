"""What the shim knows about a checkpoint apart from its bytes."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

from model.manifest import CommunicatorState, HostClass, ManifestHeader, NumericsClass, RankState
from proxy_runtime.build import Build
from proxy_runtime.shim.generation import Generation


def manifest_header(generation: Generation, counts: dict[int, dict[str, Any]]) -> ManifestHeader:
    """Header of a checkpoint of this generation.

    Args:
        generation: stopped at the cut.
        counts: per rank what its proxy reported after `finish`: `step`, `comms` (contributed, completed,
            members), `pending_operations`, `pending_bytes`.
    """
    spec = generation.spec
    return ManifestHeader(
        world_size=spec.world_size,
        placement=tuple(f"{spec.device_kind}:{device}" for device in generation.placement),
        argv=spec.argv,
        cwd=spec.cwd,
        env=spec.env,
        network=spec.network,
        build_id=generation.build.id,
        numerics=numerics_class(generation.build, spec.device_kind, spec.threads),
        host=host_class(),
        created_at_ns=time.time_ns(),
        ranks=tuple(_rank_state(generation, rank.rank, counts.get(rank.rank, {})) for rank in generation.ranks),
    )


def _rank_state(generation: Generation, rank: int, counts: dict[str, Any]) -> RankState:
    log = generation.layout.log(rank)
    return RankState(
        rank=rank,
        step=counts.get("step", 0),
        pending_operations=counts.get("pending_operations", 0),
        pending_bytes=counts.get("pending_bytes", 0),
        communicators=tuple(
            CommunicatorState(
                name=name, members=tuple(comm["members"]), contributed=comm["contributed"], completed=comm["completed"]
            )
            for name, comm in counts.get("comms", {}).items()
        ),
        log_offset=log.stat().st_size if log.exists() else 0,
    )


def numerics_class(build: Build, device_kind: str, threads: int) -> NumericsClass:
    """What decides the bits of this machine's CPU accelerators."""
    flags = _cpu_flags()
    instruction_set = "AVX512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "DEFAULT"
    return NumericsClass(
        torch=build.torch_version, device_model=device_kind, instruction_set=instruction_set, threads_per_device=threads
    )


def host_class() -> HostClass:
    """What a process image made here expects of a host."""
    return HostClass(cpu_features=_cpu_flags(), kernel_release=os.uname().release)


@functools.cache
def _cpu_flags() -> tuple[str, ...]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return tuple(sorted(line.split(":", 1)[1].split()))
    return ()
