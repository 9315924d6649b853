"""Connecting the device proxies of a job to one another, on one node or over several."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from proxy_runtime.device.connection import DEFAULT_DEADLINE_S, DeviceProxyClient
from proxy_runtime.device.errors import DeviceProxyError

Transport = Literal["shm", "tcp"]

Address = tuple[str, int]
"""Host and port."""

Pair = tuple[int, int]
"""Two devices by index, the lower one first: it listens."""


def connect_fabric(
    proxies: Sequence[DeviceProxyClient] | Mapping[int, DeviceProxyClient],
    placement: Sequence[int],
    *,
    transport: Transport | str = "shm",
    remote: Mapping[Pair, Address] | None = None,
    token: str | None = None,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> None:
    """Connects the proxies of one node to one another and to those of other nodes, each to each.

    Args:
        proxies: of this node, by index of their devices in the whole job.
        placement: for each global rank the index of its device.
        transport: between proxies of this node: `shm`, or `tcp` over the loopback.
        remote: where the lower device of a pair listens, at least for all pairs of a device here and one elsewhere;
            the other nodes must be connecting at the same time.
        token: by which proxies know each other; the same on all nodes. None for a random one.
        deadline_s: until all are connected.

    Raises:
        DeviceProxyError: of the first proxy that failed; an address is missing (`device-proxy.request`).
    """
    local = dict(proxies) if isinstance(proxies, Mapping) else dict(enumerate(proxies))
    token = token or secrets.token_hex(16)
    peers: dict[int, list[dict[str, Any]]] = {index: [] for index in local}
    descriptors: dict[int, list[int]] = {index: [] for index in local}

    def over_tcp(pair: Pair, address: Address) -> None:
        for one, other, how in ((*pair, "listen"), (*reversed(pair), "connect")):
            if one in local:
                peers[one].append({"index": other, "kind": "tcp", how: list(address)})

    with contextlib.ExitStack() as stack:
        board: list[int] = []
        segment = 0
        if len(local) > 1 and transport != "tcp":
            hello = next(iter(local.values())).hello(deadline_s=deadline_s)
            segment = hello.shm_segment_bytes
            board = sorted(local)
            shared = _segment(stack, "ergo-board", hello.board_region_bytes * len(board))
        for pair in _pairs(local, placement):
            if not set(pair) <= local.keys():
                if remote is None or pair not in remote:
                    raise DeviceProxyError(
                        f"Nobody has said where device {pair[0]} listens for device {pair[1]}.",
                        code="device-proxy.request",
                    )
                over_tcp(pair, remote[pair])
            elif transport == "tcp":
                held = stack.enter_context(reserve("127.0.0.1"))
                over_tcp(pair, address_of(held))
            else:
                fd = _segment(stack, "ergo-fabric", segment)
                for one, other in (pair, reversed(pair)):
                    peers[one].append({"index": other, "kind": "shm"})
                    descriptors[one].append(fd)
        if board:
            for index in local:
                descriptors[index].append(shared)
        with ThreadPoolExecutor(max_workers=max(1, len(local))) as pool:
            calls = [
                pool.submit(
                    proxy.fabric,
                    index,
                    placement,
                    token,
                    peers[index],
                    descriptors[index],
                    board,
                    deadline_s=deadline_s,
                )
                for index, proxy in local.items()
            ]
        for call in calls:
            call.result()


def listening_pairs(local: Sequence[int], placement: Sequence[int]) -> list[Pair]:
    """Pairs whose lower device is here and whose higher one is on another node."""
    return [pair for pair in _pairs(local, placement) if pair[0] in local and pair[1] not in local]


def reserve(host: str) -> socket.socket:
    """Takes a free TCP port, for a proxy to listen on.

    As long as the socket is open, nobody else is given the port: it is bound, but does not listen, and a proxy,
    which like it allows reuse of its address, may bind it too.

    Raises:
        DeviceProxyError: the host is none of this machine (`device-proxy.address`).
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        held = socket.socket(family, kind, protocol)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(address)
        except BaseException:
            held.close()
            raise
    except OSError as error:
        raise DeviceProxyError(
            f"Device proxies cannot listen on {host}: {error}.",
            code="device-proxy.address",
            remedy="Give the node an address of this machine that the other nodes reach.",
        ) from error
    return held


def address_of(held: socket.socket) -> Address:
    """Host and port of a reserved socket."""
    host, port = held.getsockname()[:2]
    return str(host), int(port)


def _segment(stack: contextlib.ExitStack, name: str, size: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    os.ftruncate(fd, size)
    return fd


def _pairs(local: Sequence[int] | Mapping[int, Any], placement: Sequence[int]) -> list[Pair]:
    """All pairs of devices of the job with at least one of them here."""
    used = sorted({*placement, *local})
    return [(low, high) for low in used for high in used if low < high and (low in local or high in local)]
