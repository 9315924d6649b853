"""Frames of the control socket: whole, in pieces, too long, not JSON, with descriptors, and with nobody there."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy_runtime.device.frames import MAX_FRAME_BYTES, FrameError, FrameSocket, FrameTimeout

Pair = tuple[FrameSocket, FrameSocket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = (FrameSocket(sock) for sock in socket.socketpair())
    yield left, right
    left.close()
    right.close()


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def test_objects_and_descriptors_travel_together(pair: Pair) -> None:
    left, right = pair
    read_end, write_end = os.pipe()
    left.send({"op": "attach", "rank": 3}, [write_end])
    left.send({"op": "run"})
    received = right.receive(deadline_s=5)
    assert received is not None
    value, descriptors = received
    assert value == {"op": "attach", "rank": 3} and len(descriptors) == 1
    os.write(descriptors[0], b"same pipe")
    assert os.read(read_end, 100) == b"same pipe"
    assert not os.get_inheritable(descriptors[0])
    assert right.receive(deadline_s=5) == ({"op": "run"}, [])
    for fd in (read_end, write_end, *descriptors):
        os.close(fd)


@given(
    cuts=st.lists(st.integers(1, 30), max_size=8),
    values=st.lists(st.dictionaries(st.text(), st.integers(0, 9)), max_size=3),
)
def test_frames_arrive_however_the_bytes_are_cut(cuts: list[int], values: list[dict[str, int]]) -> None:
    left, right = socket.socketpair()
    reader = FrameSocket(right)
    data = b"".join(framed(orjson.dumps(value)) for value in values)
    got = []
    for cut in [*cuts, len(data)]:
        left.sendall(data[:cut])
        data = data[cut:]
        try:
            while (frame := reader.receive(deadline_s=0)) is not None:
                got.append(frame[0])
        except FrameTimeout:
            pass  # what is missing has not been sent yet; what has come is kept
    assert got == values
    left.close()
    assert reader.receive(deadline_s=5) is None
    reader.close()


def test_a_frame_larger_than_the_socket_buffer(pair: Pair) -> None:
    left, right = pair
    value = {"bulk": "x" * (4 << 20)}
    sender = threading.Thread(target=left.send, args=(value,))
    sender.start()
    received = right.receive(deadline_s=30)
    sender.join()
    assert received is not None and received[0] == value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (struct.pack("<I", MAX_FRAME_BYTES + 1), "a frame of"),
        (framed(b"{"), "not JSON"),
        (framed(b"[1]"), "no object"),
    ],
)
def test_what_is_no_frame_is_an_error(pair: Pair, data: bytes, message: str) -> None:
    left, right = pair
    left.socket.sendall(data)
    with pytest.raises(FrameError, match=message):
        right.receive(deadline_s=5)


def test_nobody_reads_and_nobody_writes(pair: Pair) -> None:
    left, right = pair
    with pytest.raises(FrameTimeout):
        right.receive(deadline_s=0.01)
    with pytest.raises(FrameTimeout):
        left.send({"bulk": "x" * (8 << 20)}, deadline_s=0.05)
    left.close()
    with pytest.raises(BrokenPipeError):
        right.send({})
