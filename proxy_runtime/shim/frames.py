"""Frames between a shim and its clients: 4-byte little-endian length, then an orjson object."""

from __future__ import annotations

import socket
import struct
from typing import Any

import orjson

from proxy_runtime.shim.spec import RunError

PROTOCOL = 1  # agent and shim may differ by one: N-1 to N
_MAX_FRAME = 16 << 20


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends one frame. Raises OSError when the peer is gone."""
    data = orjson.dumps(message)
    connection.sendall(struct.pack("<I", len(data)) + data)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Returns the next frame, or None at the end of the stream.

    Raises:
        RunError: the peer does not speak this protocol (`run.bad-frame`).
    """
    head = _exactly(connection, 4)
    if head is None:
        return None
    (length,) = struct.unpack("<I", head)
    if length > _MAX_FRAME:
        raise RunError(f"a frame of {length} bytes arrived at the shim's socket.", code="run.bad-frame")
    body = _exactly(connection, length)
    if body is None:
        return None
    try:
        message = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RunError(f"a frame at the shim's socket is not JSON: {error}.", code="run.bad-frame") from error
    if not isinstance(message, dict):
        raise RunError("a frame at the shim's socket is not an object.", code="run.bad-frame")
    return message


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            return None
        data += part
    return bytes(data)
