"""Frames on the control socket: a 4-byte little-endian length, then a JSON object; descriptors beside it.

The format is that of docs/design/0001, "Control protocol of a device proxy". The other end runs in a job's own
environment, where nothing but the standard library and torch can be expected.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, Final

MAX_FRAME_BYTES: Final = 16 << 20
MAX_DESCRIPTORS: Final = 250  # the kernel takes 253 in one message

_LENGTH: Final = struct.Struct("<I")


class FrameError(Exception):
    """The other side sent something that is no frame."""


class FrameTimeout(Exception):
    """No complete frame came, or none could be sent, before the deadline."""


class FrameSocket:
    """One end of a control connection. Not thread-safe.

    A timeout leaves what has arrived in the buffer, so that the next `receive` goes on where it was.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.setblocking(False)
        self._buffer = bytearray()
        self._descriptors: list[int] = []

    def send(self, value: dict[str, Any], descriptors: Sequence[int] = (), *, deadline_s: float = 10.0) -> None:
        """Sends one frame. The descriptors stay the caller's.

        Raises:
            FrameTimeout: the other side did not read for `deadline_s` seconds.
            OSError: the connection is gone.
        """
        body = json.dumps(value, separators=(",", ":")).encode()
        data = memoryview(_LENGTH.pack(len(body)) + body)
        until = time.monotonic() + deadline_s
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", list(descriptors)))] if descriptors else []
        while data:
            try:
                sent = self.socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._wait(select.POLLOUT, until)
                continue
            ancillary = []  # they travel with the first byte
            data = data[sent:]

    def receive(self, *, deadline_s: float | None = None) -> tuple[dict[str, Any], list[int]] | None:
        """The next frame and its descriptors, which become the caller's; None when the other side has closed.

        Raises:
            FrameTimeout: nothing complete came for `deadline_s` seconds.
            FrameError: what came is no frame.
        """
        until = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            if (value := self._take()) is not None:
                descriptors, self._descriptors = self._descriptors, []
                return value, descriptors
            try:
                data, ancillary, flags, _ = self.socket.recvmsg(
                    1 << 16, socket.CMSG_SPACE(MAX_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                self._wait(select.POLLIN, until)
                continue
            except ConnectionResetError:
                return None
            self._keep_descriptors(ancillary)
            if flags & socket.MSG_CTRUNC:
                raise FrameError("descriptors of a frame were lost")
            if not data:
                return None
            self._buffer += data

    def close(self) -> None:
        """Closes the socket and every descriptor that came and was not taken."""
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors = []
        self.socket.close()

    def _take(self) -> dict[str, Any] | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_FRAME_BYTES:
            raise FrameError(f"a frame of {length} bytes")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            value = json.loads(body)
        except ValueError as error:
            raise FrameError(f"a frame that is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise FrameError("a frame that is no object")
        return value

    def _keep_descriptors(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._descriptors.extend(fds)

    def _wait(self, event: int, until: float | None) -> None:
        poller = select.poll()
        poller.register(self.socket, event)
        if until is None:
            poller.poll()
            return
        left = until - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            raise FrameTimeout
