"""Ports of this machine: which are free, and who answers."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from pathlib import Path

from proxy_runtime.errors import ErgoError

HOST = "127.0.0.1"
_LOWEST = 10_240
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 200


def free_port(taken: Collection[int] = ()) -> int:
    """A port that nothing listens on and that the kernel does not give to outgoing connections.

    A server here comes back at its own port after a crash. Were that an ephemeral one, an outgoing connection could
    have it by then; on one machine even that of its own waiting clients, who would then talk to themselves.

    Raises:
        ErgoError: ``ports.none``.
    """
    try:
        end = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        end = 32_768
    if end - _LOWEST < _TRIES:
        end = 61_000  # an unusual machine: any port is better than none
    for port in random.sample(range(_LOWEST, end), _TRIES):
        if port not in taken and is_free(port):
            return port
    raise ErgoError(f"No free port was found in {_LOWEST}-{end}.", code="ports.none", remedy="End what listens there.")


def is_free(port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closing connections do not count
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError:
            return False
        return True


def accepts(port: int, host: str = HOST, timeout_s: float = 1.0) -> bool:
    """Whether something listens there."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as probe:
            return probe.getsockname() != probe.getpeername()
    except OSError:
        return False


def require_free(port: int, what: str, option: str) -> None:
    """Checks a port that was asked for.

    Raises:
        ErgoError: ``ports.taken``.
    """
    if not is_free(port):
        raise ErgoError(
            f"Port {port}, asked for {what}, is taken by another process.",
            code="ports.taken",
            remedy=f"Give another {option}, or none for any free port.",
        )
