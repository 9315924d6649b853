"""What the shim knows about a checkpoint apart from its bytes."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from model.ids import Step
from model.manifest import CommunicatorState, HostClass, ManifestHeader, NumericsClass, RankState
from proxy_runtime.build import Build
from proxy_runtime.checkpoint.parts import Part
from proxy_runtime.checkpoint.reader import CheckpointReader
from proxy_runtime.checkpoint.writer import CheckpointWriter
from proxy_runtime.shim.generation import Generation, Rank
from proxy_runtime.shim.spec import RunSpec


def manifest_header(generation: Generation, ranks: tuple[RankState, ...]) -> ManifestHeader:
    """Header of a checkpoint of a generation that has all ranks of its job.

    Args:
        generation: stopped at the cut.
        ranks: where they stand.
    """
    spec = generation.spec
    placement = tuple(f"{spec.device_kind}:{device}" for device in generation.placement)
    return job_header(spec, generation.build, placement, ranks, time.time_ns())


def job_header(
    spec: RunSpec, build: Build, placement: tuple[str, ...], ranks: tuple[RankState, ...], created_at_ns: int
) -> ManifestHeader:
    """Header of a checkpoint of a job, made on a node of its class.

    Args:
        spec: of the job; its environment becomes part of the header.
        build: that its ranks run with.
        placement: per rank the device it was on.
        ranks: of all nodes, in rank order.
        created_at_ns: when the cut was taken.
    """
    return ManifestHeader(
        world_size=spec.world_size,
        placement=placement,
        argv=spec.argv,
        cwd=spec.cwd,
        env=spec.env,
        network=spec.network,
        pack=spec.pack,
        python=spec.python,
        build_id=build.id,
        numerics=numerics_class(build, spec.device_kind, spec.threads),
        host=host_class(),
        created_at_ns=created_at_ns,
        ranks=ranks,
    )


def rank_states(generation: Generation, counts: dict[int, dict[str, Any]]) -> tuple[RankState, ...]:
    """Where the local ranks stand, by what their proxies have counted."""
    return tuple(_rank_state(generation, rank, counts.get(rank.rank, {})) for rank in generation.ranks)


def restored_state(saved: RankState, counts: dict[str, Any]) -> RankState:
    """State of a rank as it was saved, with its counts as they were loaded."""
    loaded = {
        comm.name: comm.model_copy(
            update={"contributed": counts[comm.name]["contributed"], "completed": counts[comm.name]["completed"]}
        )
        for comm in saved.communicators
        if comm.name in counts
    }
    return saved.model_copy(update={"communicators": tuple(loaded.values())})


def sketched(states: Iterable[RankState], sketch: Callable[[int], tuple[str, ...]]) -> tuple[RankState, ...]:
    """The same with what tells replicas: `sketch` says it of a rank's device memory."""
    return tuple(state.model_copy(update={"sketch": sketch(state.rank)}) for state in states)


def sketch_in(writer: CheckpointWriter) -> Callable[[int], tuple[str, ...]]:
    """Of ranks whose device memory has been given to `writer`."""
    return lambda rank: writer.sketch(Part.device(rank), "storages")


def _rank_state(generation: Generation, rank: Rank, counts: dict[str, Any]) -> RankState:
    log = generation.layout.log(rank.rank)
    memory = counts.get("memory", {})
    return RankState(
        rank=rank.rank,
        step=Step(max(counts.get("step", 0), rank.step)),
        pending_operations=counts.get("pending_operations", 0),
        pending_bytes=counts.get("pending_bytes", 0),
        communicators=tuple(
            CommunicatorState(
                name=name,
                members=tuple(comm["members"]),
                contributed=comm["contributed"],
                completed=comm["completed"],
                scatters=comm.get("scatters", False),
            )
            for name, comm in counts.get("comms", {}).items()
        ),
        log_offset=log.stat().st_size if log.exists() else 0,
        device_bytes=memory.get("bytes", 0),
        peak_bytes=memory.get("peak_bytes", 0),
        gradient_bytes=memory.get("gradient_bytes", 0),
    )


def restorable(reader: CheckpointReader, spec: RunSpec, build: Build) -> CheckpointReader:
    """The same checkpoint, which can be continued here.

    Raises:
        CheckpointError: it was made by another build, or for another class of device or host.
    """
    reader.require(
        build_id=build.id,
        numerics=numerics_class(build, spec.device_kind, spec.threads),
        cpu_features=host_class().cpu_features,
    )
    return reader


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
