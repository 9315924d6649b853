"""From a request to a shim: what a part is started with, and whether this node can."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model.ids import Epoch, JobId, NodeId
from model.job_spec import JobSpec
from model.manifest import Manifest, NumericsClass
from model.placement import Placement
from proxy_runtime import build
from proxy_runtime.build import Build
from proxy_runtime.node import volumes
from proxy_runtime.node.environment import Command
from proxy_runtime.node.errors import unsuitable
from proxy_runtime.node.ledger import PartRecord
from proxy_runtime.shim.header import host_class
from proxy_runtime.shim.spec import SLOTS_PER_DEVICE, NodePart, RunSpec

Network = Literal["host", "none", "private"]


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """What is the same for all jobs of a node.

    Attributes:
        devices: names of its accelerators, in order.
        device_kind: torch device type of its accelerators.
        threads: of each device.
        store: directory of its chunk store.
        host: address that other nodes reach its device proxies at.
    """

    node: NodeId
    devices: tuple[str, ...]
    device_kind: str
    threads: int
    store: Path
    host: str


def network_of(spec: JobSpec) -> Network:
    """What a job's ranks get: a network of their own with a way out does not exist yet, so it is the host's."""
    return "none" if spec.network == "none" else "host"


def require_devices(profile: NodeProfile, placement: Placement) -> None:
    """Checks that the placement's devices of this node are there.

    Raises:
        NodeError: ``runtime.unsuitable``, with the device that is not.
    """
    for device in placement.devices:
        if device.node == profile.node and "/".join(device.path) not in profile.devices:
            raise unsuitable(
                f"Node {profile.node} has no device {'/'.join(device.path)}; it has {', '.join(profile.devices)}.",
                "Place the job on devices of the node's record.",
            )


def require_fitting(manifest: Manifest, numerics: NumericsClass) -> Build:
    """The build that a checkpoint needs, if this node can restore it.

    Raises:
        NodeError: ``runtime.unsuitable``: it lacks the build, its numerics class is another, or its processor lacks
            features that the process images use.
    """
    header = manifest.header
    try:
        found = build.by_id(header.build_id)
    except build.BuildError as error:
        raise unsuitable(
            f"Checkpoint {manifest.root} needs another build: {error.message}", error.remedy or "Use another node."
        ) from error
    if header.numerics != numerics:
        left, right = header.numerics.model_dump(), numerics.model_dump()
        what = "; ".join(f"{key} {left[key]}, here {right[key]}" for key in left if left[key] != right[key])
        raise unsuitable(
            f"Checkpoint {manifest.root} is of another numerics class ({what}).", "Use a node of its class."
        )
    missing = sorted(set(header.host.cpu_features) - set(host_class().cpu_features))
    if missing:
        raise unsuitable(
            f"The processor of this node lacks {', '.join(missing[:5])}, which processes of checkpoint "
            f"{manifest.root} may use.",
            "Use a node with a processor at least as new.",
        )
    return found


def fresh_record(
    job: JobId, epoch: Epoch, spec: JobSpec, placement: Placement, command: Command, made: Build, first_run: str
) -> PartRecord:
    """Of a part that starts its command anew."""
    return PartRecord(
        job=job,
        epoch=epoch,
        spec=spec,
        placement=placement,
        build_id=made.id,
        argv=command.argv,
        cwd=volumes.inside(spec, job),
        env=command.env,
        network=network_of(spec),
        first_run=first_run,
    )


def restored_record(
    epoch: Epoch, spec: JobSpec, placement: Placement, manifest: Manifest, first_run: str
) -> PartRecord:
    """Of a part that goes on from a checkpoint: command, directory and network are what they were."""
    header = manifest.header
    return PartRecord(
        job=manifest.job,
        epoch=epoch,
        spec=spec,
        placement=placement,
        build_id=header.build_id,
        argv=tuple(header.argv),
        cwd=header.cwd,
        env=dict(header.env),
        network=header.network,
        checkpoint=manifest.root,
        first_run=first_run,
    )


def device_of_rank(record: PartRecord) -> tuple[int, ...]:
    """For each rank as the shim counts them, the index of its device: in a tree each channel to a device is one."""
    each = SLOTS_PER_DEVICE if record.spec.pack == "node" else 1
    return tuple(index for index in record.placement.device_of_rank for _ in range(each))


def run_spec(profile: NodeProfile, record: PartRecord, env: dict[str, str], base: Path, python: str = "") -> RunSpec:
    """What the shim is told; `python` as in `RunSpec`."""
    placement, placed = record.placement, device_of_rank(record)
    local = tuple(index for index, device in enumerate(placement.devices) if device.node == profile.node)
    network: Network = "none" if record.network == "none" else "private" if record.network == "private" else "host"
    return RunSpec(
        job_id=record.job,
        argv=record.argv,
        cwd=record.cwd,
        env=env,
        world_size=len(placed),
        devices=placement.width,
        checkpoint_dir=str(profile.store),
        device_kind=profile.device_kind,
        threads=profile.threads,
        device_memory=record.spec.device_memory_bytes or 0,
        network=network,
        linger=True,
        base_dir=str(base),
        python=python,
        pack=record.spec.pack,
        part=NodePart(
            node=str(profile.node),
            epoch=int(record.epoch),
            device_of_rank=placed,
            local_devices=local,
            tenant=record.spec.tenant,
        ),
    )
