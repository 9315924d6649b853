"""Connecting the device proxies of a node to one another."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from proxy_runtime.device.connection import DEFAULT_DEADLINE_S, DeviceProxyClient

Transport = Literal["shm", "tcp"]


def connect_fabric(
    proxies: Sequence[DeviceProxyClient],
    placement: Sequence[int],
    *,
    transport: Transport | str = "shm",
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> None:
    """Connects the proxies of one node to one another, each to each.

    Args:
        proxies: by index.
        placement: for each global rank the index of its proxy.
        transport: `shm`, or `tcp` over the loopback (what proxies of several nodes use).

    Raises:
        DeviceProxyError: of the first proxy that failed.
    """
    token = secrets.token_hex(16)
    peers: list[list[dict[str, Any]]] = [[] for _ in proxies]
    descriptors: list[list[int]] = [[] for _ in proxies]
    with contextlib.ExitStack() as stack:
        segment = proxies[0].hello(deadline_s=deadline_s).shm_segment_bytes if len(proxies) > 1 else 0
        for low in range(len(proxies)):
            for high in range(low + 1, len(proxies)):
                if transport == "shm":
                    fd = os.memfd_create("ergo-fabric", os.MFD_CLOEXEC)
                    stack.callback(os.close, fd)
                    os.ftruncate(fd, segment)
                    for one, other in ((low, high), (high, low)):
                        peers[one].append({"index": other, "kind": "shm"})
                        descriptors[one].append(fd)
                else:
                    address = ["127.0.0.1", _free_port()]
                    peers[low].append({"index": high, "kind": "tcp", "listen": address})
                    peers[high].append({"index": low, "kind": "tcp", "connect": address})
        with ThreadPoolExecutor(max_workers=max(1, len(proxies))) as pool:
            calls = [
                pool.submit(
                    proxy.fabric, index, placement, token, peers[index], descriptors[index], deadline_s=deadline_s
                )
                for index, proxy in enumerate(proxies)
            ]
        for call in calls:
            call.result()


def _free_port() -> int:
    # Taken again by the proxy a moment later; a collision is a clear error of `connect_fabric`, which can be repeated.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
