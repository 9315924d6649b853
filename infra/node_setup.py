"""What a node agent needs before it can work: the node's record, its peer, and a way to end what is left."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from model.ids import DeviceId, NodeId
from model.records import NodeDevice, NodeRecord
from proxy_runtime import build
from proxy_runtime.device.launcher import check_settings
from proxy_runtime.errors import ErgoError
from proxy_runtime.node.lease import boot_id, lock_directory
from proxy_runtime.shim.header import numerics_class
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.part_client import PartClient

THREADS = 1
"""Of each CPU accelerator: their number decides the bits, so it is the same on all nodes."""


def node_record(name: str, cluster: str, address: str, devices: int, lease_s: float) -> NodeRecord:
    """What the node says of itself; makes the runtime's build where it is missing.

    Raises:
        ErgoError: ``node.devices``: no devices; ``device-proxy.setting``: the environment says of device proxies what
            they cannot read; or there is no build and none can be made.
        ModelError: the name is none of a node.
    """
    if devices < 1:
        raise ErgoError(
            f"The node {name} cannot have {devices} devices.",
            code="node.devices",
            remedy="Give it --devices 1 or more.",
        )
    check_settings(os.environ)
    node = NodeId(name, 1)  # the incarnation is given by the record's claim
    memory = psutil.virtual_memory().total // devices
    return NodeRecord(
        node=node,
        cluster=cluster,
        boot_id=boot_id(),
        address=address,
        devices=tuple(
            NodeDevice(id=DeviceId(node, (f"cpu-{index}",)), accelerator="cpu", memory_bytes=memory)
            for index in range(devices)
        ),
        numerics=numerics_class(build.ensure(), "cpu", THREADS),
        lease_s=lease_s,
    )


def end_parts(directory: Path) -> int:
    """Ends everything of jobs that a node's directory has, without its agent, which must not run.

    Returns:
        How many parts were ended.

    Raises:
        ErgoError: an agent has the directory, or something does not end.
    """
    lock = lock_directory(directory)
    try:
        parts = list(RunLayout.parts_in(directory / "runs"))
        for layout, _ in parts:
            PartClient(layout).end()
        for record in (directory / "parts").glob("*.json"):
            record.unlink()
        return len(parts)
    finally:
        os.close(lock)
