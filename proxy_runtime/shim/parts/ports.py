"""Where the device proxies of a part listen for those of other nodes."""

from __future__ import annotations

import socket

from proxy_runtime.device.wiring import address_of, listening_pairs, reserve
from proxy_runtime.shim.part import Endpoint
from proxy_runtime.shim.spec import NodePart


class Ports:
    """Ports that are kept from others until the proxies listen there."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def reserve(self, part: NodePart, host: str) -> tuple[Endpoint, ...]:
        """One for every pair of devices whose lower one is of this part, and the other one is not."""
        pairs = listening_pairs(part.local_devices, part.device_of_rank)
        self._held = [reserve(host) for _ in pairs]
        return tuple(Endpoint(*pair, host, address_of(held)[1]) for pair, held in zip(pairs, self._held, strict=True))

    def let_go(self) -> None:
        """The proxies listen, or never will."""
        for held in self._held:
            held.close()
        self._held = []
