"""Fabric: control messages, sleeping and waking, damaged streams, shared memory segments, the TCP handshake."""

from __future__ import annotations

import os
import socket
import threading
import time
from types import ModuleType
from typing import Any

import pytest

from tests.native.build import fabric_module
from tests.proxy_runtime.cut.program import SUM, Kind
from tests.proxy_runtime.device.fabric_helpers import Pair, free_port


@pytest.fixture(scope="session")
def native() -> ModuleType:
    return fabric_module()


# Control messages and pumping


def pump_both(pair: Pair) -> list[list[tuple[int, bytes]]]:
    pair.settle()
    return [engine.take_control() for engine in pair.engines]


def test_control_messages_arrive_whole_and_in_order(native: ModuleType) -> None:
    pair = Pair(native)
    sent = [b"", b"a", os.urandom(300_000), b"b" * 64, os.urandom(5)]
    for message in sent:
        pair.fabrics[0].send_control(1, message)
    pair.fabrics[1].send_control(0, b"reply")
    at_0, at_1 = pump_both(pair)
    assert [bytes_ for _, bytes_ in at_1] == sent
    assert at_0 == [(1, b"reply")]
    assert pair.fabrics[0].flushed()


def test_a_sleeper_is_woken_by_a_peer(native: ModuleType) -> None:
    """Without a doorbell the wait would last to its deadline."""
    for kind in ("shm", "tcp"):
        fabrics = [native.Fabric(0), native.Fabric(1)]
        if kind == "shm":
            fd = os.memfd_create("fabric")
            os.ftruncate(fd, native.shm_segment_bytes(1 << 12))
            fabrics[0].add_shm_peer(1, fd, True)
            fabrics[1].add_shm_peer(0, fd, False)
            os.close(fd)
        else:
            ends = socket.socketpair()
            fabrics[0].add_tcp_peer(1, ends[0].detach())
            fabrics[1].add_tcp_peer(0, ends[1].detach())
        engines = [native.Engine(p, [0, 1], fabrics[p]) for p in (0, 1)]
        # Larger than ring or socket buffer: the sender sleeps for space while the receiver sleeps for data.
        message = os.urandom(3_000_000)
        fabrics[0].send_control(1, message)
        sender = threading.Thread(target=engines[0].wait, args=(20.0,))
        sender.start()
        began = time.monotonic()
        assert engines[1].wait(20.0), kind
        assert time.monotonic() - began < 20.0
        assert engines[1].take_control() == [(0, message)]
        fabrics[1].send_control(0, b"thanks")
        engines[1].pump()
        sender.join()
        assert engines[0].take_control() == [(1, b"thanks")]


# Bad streams


def raw_peer(native: ModuleType) -> tuple[Any, socket.socket]:
    """An engine whose peer 1 is a socket that the test writes to."""
    ours, theirs = socket.socketpair()
    fabric = native.Fabric(0)
    fabric.add_tcp_peer(1, ours.detach())
    engine = native.Engine(0, [0, 1], fabric)
    engine.define(7, [0, 1])
    theirs.settimeout(10)
    return (engine, fabric), theirs


def good_frames(native: ModuleType) -> bytes:
    """What proxy 1 sends for one barrier of rank 1."""
    ours, theirs = socket.socketpair()
    fabric = native.Fabric(1)
    fabric.add_tcp_peer(0, ours.detach())
    engine = native.Engine(1, [0, 1], fabric)
    engine.define(7, [0, 1])
    engine.issue(1, 7, Kind.BARRIER, SUM, 0, [], b"", 0)
    engine.pump()
    return theirs.recv(4096)


def test_damaged_frames_are_errors_that_name_the_peer(native: ModuleType) -> None:
    frame = good_frames(native)
    assert len(frame) == 104
    for position in range(len(frame)):
        damaged = bytearray(frame)
        damaged[position] ^= 0x10
        (engine, fabric), peer = raw_peer(native)
        peer.sendall(bytes(damaged))
        with pytest.raises(native.FabricError, match="bad frame from proxy 1") as caught:
            engine.pump()
        assert caught.value.args
        assert 1 in fabric.lost()
    (engine, fabric), peer = raw_peer(native)
    peer.sendall(frame)
    while engine.pump():
        pass
    assert not fabric.lost()


def test_a_contribution_that_comes_twice_or_too_late_is_an_error(native: ModuleType) -> None:
    frame = good_frames(native)
    (engine, _), peer = raw_peer(native)
    peer.sendall(frame * 2)
    with pytest.raises(native.FabricError, match="a contribution came twice"):
        engine.pump()
    (engine, _), peer = raw_peer(native)
    engine.issue(0, 7, Kind.BARRIER, SUM, 0, [], b"", 0)
    peer.sendall(frame)
    while engine.pump():
        pass
    peer.sendall(frame)
    with pytest.raises(native.FabricError, match="complete already"):
        engine.pump()


def test_a_stream_that_ends_inside_a_frame_is_a_lost_peer(native: ModuleType) -> None:
    for length in (0, 5, 104 + 10):
        (engine, fabric), peer = raw_peer(native)
        frame = good_frames(native)
        if length > 104:
            sender = native.Fabric(1)
            ours, theirs = socket.socketpair()
            sender.add_tcp_peer(0, ours.detach())
            sender.send_control(0, b"x" * 100)
            native.Engine(1, [0, 1], sender).pump()
            frame = theirs.recv(4096)
        peer.sendall(frame[:length])
        peer.close()
        while engine.pump():
            pass
        why = fabric.lost()[1]
        assert "proxy 1 is gone" in why
        assert ("in the middle of a frame" in why) == (length > 0)
        fabric.send_control(1, b"nobody listens")  # no error: the loss is known
        assert fabric.flushed()


def test_a_shared_memory_segment_is_checked(native: ModuleType) -> None:
    def segment(size: int) -> int:
        fd = os.memfd_create("fabric")
        os.ftruncate(fd, size)
        return fd

    small = segment(100)
    with pytest.raises(native.FabricError, match="is too small"):
        native.Fabric(0).add_shm_peer(1, small, True)
    fd = segment(native.shm_segment_bytes(4096))
    first, second = native.Fabric(0), native.Fabric(2)
    first.add_shm_peer(1, fd, True)
    with pytest.raises(native.FabricError, match="already used on this side"):
        second.add_shm_peer(0, fd, True)
    with pytest.raises(native.FabricError, match="or known already"):
        first.add_shm_peer(1, fd, False)
    # The wrong proxy behind the other half is found with its first byte.
    second.add_shm_peer(0, fd, False)
    second.send_control(0, b"hello")
    native.Engine(2, [0, 1, 2], second).pump()
    with pytest.raises(native.FabricError, match=r"expected proxy 1 .* found proxy 2"):
        native.Engine(0, [0, 1, 2], first).pump()
    for descriptor in (small, fd):
        os.close(descriptor)


# The handshake


def connect_all(
    native: ModuleType, specs: dict[int, list[tuple[int, bool, str, int]]], tokens: dict[int, bytes], timeout_s: float
) -> dict[int, str]:
    """Connects all proxies at once in threads; the error sentence of each, or an empty string."""
    found: dict[int, str] = {}
    fabrics = {me: native.Fabric(me) for me in specs}

    def connect(me: int) -> None:
        try:
            fabrics[me].connect_tcp_peers(specs[me], tokens[me], timeout_s)
            found[me] = ""
        except native.FabricError as error:
            found[me] = str(error)

    threads = [threading.Thread(target=connect, args=(me,)) for me in specs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def two(port: int) -> dict[int, list[tuple[int, bool, str, int]]]:
    return {0: [(1, True, "127.0.0.1", port)], 1: [(0, False, "127.0.0.1", port)]}


def test_handshake_with_the_same_token(native: ModuleType) -> None:
    assert connect_all(native, two(free_port()), {0: b"t", 1: b"t"}, 20) == {0: "", 1: ""}


@pytest.mark.parametrize("other", [b"", b"u", b"tt", b"t\0"])
def test_another_token_is_refused(native: ModuleType, other: bytes) -> None:
    found = connect_all(native, two(free_port()), {0: b"t", 1: other}, 0.5)
    assert "proxy 1 did not connect to 127.0.0.1" in found[0]
    assert "proxy 0 could not be reached at 127.0.0.1" in found[1]
    assert "it refused the handshake" in found[1]


def test_a_proxy_with_another_index_is_refused(native: ModuleType) -> None:
    port = free_port()
    specs = {0: [(1, True, "127.0.0.1", port)], 2: [(0, False, "127.0.0.1", port)]}
    found = connect_all(native, specs, {0: b"t", 2: b"t"}, 0.5)
    assert all(found.values())


def test_nobody_there_is_an_error_at_the_deadline(native: ModuleType) -> None:
    began = time.monotonic()
    with pytest.raises(
        native.FabricError, match=r"proxy 3 could not be reached at 127\.0\.0\.1:\d+ \(Connection refused\)"
    ):
        native.Fabric(0).connect_tcp_peers([(3, False, "127.0.0.1", free_port())], b"t", 0.3)
    assert time.monotonic() - began >= 0.3


def test_strangers_do_not_disturb(native: ModuleType) -> None:
    port = free_port()
    ready: dict[int, str] = {}
    listener = threading.Thread(target=lambda: ready.update(connect_all(native, {0: two(port)[0]}, {0: b"t"}, 30)))
    listener.start()
    strangers = []
    deadline = time.monotonic() + 20
    while len(strangers) < 5 and time.monotonic() < deadline:
        try:
            strangers.append(socket.create_connection(("127.0.0.1", port)))
        except ConnectionRefusedError:
            continue
    for i, stranger in enumerate(strangers):
        stranger.sendall(os.urandom(1000) if i % 2 else b"GET / HTTP/1.1")
    assert connect_all(native, {1: two(port)[1]}, {1: b"t"}, 20) == {1: ""}
    listener.join()
    assert ready == {0: ""}
    for stranger in strangers:
        stranger.close()


def test_another_version_with_the_right_token_is_said(native: ModuleType) -> None:
    port = free_port()
    found: dict[int, str] = {}
    listener = threading.Thread(target=lambda: found.update(connect_all(native, {0: two(port)[0]}, {0: b"t"}, 20)))
    listener.start()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            peer = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            continue
    hello = (0x4F4C4C4548474645).to_bytes(8, "little") + (9).to_bytes(4, "little") + (1).to_bytes(4, "little")
    hello += (0).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"t" + bytes(255)
    peer.sendall(hello)
    listener.join()
    peer.close()
    assert "proxy 1 speaks fabric version 9, this build speaks 2" in found[0]
