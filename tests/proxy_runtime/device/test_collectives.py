"""Fabric and collectives between real processes over shared memory and TCP, and what is refused."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.native.build import fabric_module
from tests.proxy_runtime.cut.program import SUM, Kind, evaluate, pack, random_program

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "a token of the job"
TIMEOUT_S = 60.0
F32 = 6


@pytest.fixture(scope="session")
def native() -> ModuleType:
    return fabric_module()


class Pair:
    """Two proxies with one rank each in this process, over an in-memory link that is delivered at once."""

    def __init__(self, native: ModuleType, placement: list[int] | None = None) -> None:
        self.link = native.MemoryLink()
        self.fabrics = [native.Fabric(0), native.Fabric(1)]
        self.fabrics[0].add_memory_peer(1, self.link, 0)
        self.fabrics[1].add_memory_peer(0, self.link, 1)
        self.engines = [native.Engine(p, placement or [0, 1], self.fabrics[p]) for p in (0, 1)]
        for engine in self.engines:
            engine.define(7, [0, 1])

    def issue(self, rank: int, kind: Kind, *, values: list[float] | None = None, op: int = SUM, root: int = 0) -> None:
        arrays = [] if values is None else [np.array(values, np.float32)]
        segments = [(F32, 4, a.nbytes) for a in arrays]
        self.engines[rank].issue(rank, 7, kind, op, root, segments, pack(arrays), 0)

    def settle(self) -> list[Any]:
        """Delivers and pumps until nothing moves; returns what has completed."""
        moving = True
        while moving:
            moving = any([engine.pump() for engine in self.engines])
            moving |= any([self.link.deliver(side, 1 << 30) for side in (0, 1)])
        return [done for engine in self.engines for done in engine.take_done()]


# Between processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_proxies(
    native: ModuleType, placement: list[int], seed: int, length: int, link: Callable[[int, int], str], ring_bytes: int
) -> list[subprocess.Popen[str]]:
    """One process for each proxy; `link(a, b)` says "shm" or "tcp"."""
    proxies = max(placement) + 1
    plans: list[dict[str, Any]] = [
        {"self": p, "placement": placement, "seed": seed, "length": length, "shm": [], "tcp": [], "token": TOKEN}
        | {"timeout_s": TIMEOUT_S}
        for p in range(proxies)
    ]
    fds: list[int] = []
    for a in range(proxies):
        port = free_port()  # one address for all that connect to `a`
        for b in range(a + 1, proxies):
            if link(a, b) == "shm":
                fds.append(os.memfd_create("fabric"))
                os.ftruncate(fds[-1], native.shm_segment_bytes(ring_bytes))
                plans[a]["shm"].append((b, fds[-1], True))
                plans[b]["shm"].append((a, fds[-1], False))
            else:
                plans[a]["tcp"].append((b, True, "127.0.0.1", port))
                plans[b]["tcp"].append((a, False, "127.0.0.1", port))
    processes = [start_worker(plan, fds) for plan in plans]
    for fd in fds:
        os.close(fd)
    return processes


def start_worker(plan: dict[str, Any], fds: list[int]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.proxy_runtime.device.fabric_worker", json.dumps(plan)]
    return subprocess.Popen(
        command, cwd=ROOT, pass_fds=fds, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def outputs(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each; nothing is left behind."""
    try:
        return [(p.returncode, out, err) for p in processes for out, err in [p.communicate(timeout=2 * TIMEOUT_S)]]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


LINKS: dict[str, Callable[[int, int], str]] = {
    "shm": lambda a, b: "shm",
    "tcp": lambda a, b: "tcp",
    "both": lambda a, b: "shm" if a // 2 == b // 2 else "tcp",  # two proxies a node
}


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize(("placement", "seed"), [([0, 0, 1, 1], 11), ([0, 1, 2, 3, 2], 12)])
def test_processes_compute_the_bits_of_the_direct_evaluation(
    native: ModuleType, links: str, placement: list[int], seed: int
) -> None:
    length = 60
    # A ring far smaller than the messages: they pass in pieces.
    states: dict[int, int] = {}
    for code, out, err in outputs(start_proxies(native, placement, seed, length, LINKS[links], 4096)):
        assert code == 0, err
        report = json.loads(out)
        assert report["ended"]
        states |= {int(rank): state for rank, state in report["states"].items()}
    truth = evaluate(random_program(random.Random(seed), len(placement), length))
    assert [states[rank] for rank in range(len(placement))] == truth.states


@pytest.mark.parametrize("links", ["shm", "tcp"])
def test_a_peer_that_ends_early_is_named_by_those_that_need_it(native: ModuleType, links: str) -> None:
    program = random_program(random.Random(3), 2, 40)
    index = next(s.index for s in program.steps[20:] if getattr(s, "kind", None) == Kind.ALL_REDUCE and s.comm == 7)
    fds: list[int] = []
    plans = [
        {"self": p, "placement": [0, 1], "seed": 3, "length": 40, "shm": [], "tcp": [], "token": TOKEN}
        | {"timeout_s": TIMEOUT_S}
        for p in (0, 1)
    ]
    plans[1]["die_at"] = index
    if links == "shm":
        fds.append(os.memfd_create("fabric"))
        os.ftruncate(fds[0], native.shm_segment_bytes(1 << 16))
        plans[0]["shm"], plans[1]["shm"] = [(1, fds[0], True)], [(0, fds[0], False)]
    else:
        port = free_port()
        plans[0]["tcp"], plans[1]["tcp"] = [(1, True, "127.0.0.1", port)], [(0, False, "127.0.0.1", port)]
    first, second = outputs([start_worker(plan, fds) for plan in plans])
    for fd in fds:
        os.close(fd)
    assert second[0] == 77
    assert first[0] == 1
    assert "for a rank whose device proxy is lost: proxy 1 is gone" in first[2]


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


# Refused by the engine


def test_members_that_make_different_calls_get_the_same_sentence(native: ModuleType) -> None:
    pair = Pair(native)
    pair.issue(0, Kind.ALL_REDUCE, values=[1, 2])
    pair.issue(1, Kind.REDUCE, values=[1, 2], root=1)
    pair.issue(0, Kind.ALL_REDUCE, values=[1])
    pair.issue(1, Kind.ALL_REDUCE, values=[1])
    done = pair.settle()
    errors = {error for *_, error in done if error}
    assert len(errors) == 1
    assert "collective 1 of communicator 7: rank 0 called AllReduce" in errors.pop()
    # The next one is not harmed.
    assert [blocks[0][:4] for *_, blocks, error in done if not error] == [np.float32(2).tobytes()] * 2


def test_members_with_different_sizes_get_an_error(native: ModuleType) -> None:
    pair = Pair(native)
    pair.issue(0, Kind.ALL_REDUCE, values=[1, 2])
    pair.issue(1, Kind.ALL_REDUCE, values=[1, 2, 3] * 20_000)
    done = pair.settle()
    assert len(done) == 2
    assert all("differ in size or dtype" in error for *_, error in done)


def test_a_reduction_that_the_dtype_lacks_is_an_error_at_all_members(native: ModuleType) -> None:
    for count in (3, 40_000):  # whole and in chunks
        pair = Pair(native)
        pair.issue(0, Kind.ALL_REDUCE, values=[1.0] * count, op=5)
        pair.issue(1, Kind.ALL_REDUCE, values=[1.0] * count, op=5)
        done = pair.settle()
        assert len(done) == 2
        assert all("not defined for floating point" in error for *_, error in done)


def test_issue_refuses_what_cannot_be_executed(native: ModuleType) -> None:
    pair = Pair(native)
    engine = pair.engines[0]
    four = (F32, 4, 4)
    cases: list[tuple[str, tuple[Any, ...]]] = [
        ("communicator 9 is not defined", (0, 9, Kind.BARRIER, SUM, 0, [], b"")),
        ("rank 5 is no member", (5, 7, Kind.BARRIER, SUM, 0, [], b"")),
        ("rank 1 does not live on proxy 0", (1, 7, Kind.BARRIER, SUM, 0, [], b"")),
        ("group rank 2 of 2 does not exist", (0, 7, Kind.BROADCAST, SUM, 2, [], b"")),
        ("cannot send to itself", (0, 7, Kind.SEND, SUM, 0, [four], bytes(64))),
        ("1 input blocks for 2 members", (0, 7, Kind.REDUCE_SCATTER, SUM, 0, [four], bytes(64))),
        ("gives no input", (0, 7, Kind.RECV, SUM, 1, [four], bytes(64))),
        ("60 packed bytes where the segments need 64", (0, 7, Kind.ALL_REDUCE, SUM, 0, [four], bytes(60))),
        ("no multiple of its element", (0, 7, Kind.ALL_REDUCE, SUM, 0, [(F32, 4, 6)], bytes(64))),
        ("unknown kind", (0, 7, 11, SUM, 0, [], b"")),
    ]
    for sentence, arguments in cases:
        with pytest.raises(native.CollectiveError, match=sentence):
            engine.issue(*arguments, 0)
    assert engine.counts(0)["7"]["contributed"] == 0
    for members in ([1, 0], [0, 1, 1], []):
        with pytest.raises(native.CollectiveError, match=r"different members|twice|no members"):
            engine.define(7 if len(members) == 2 else 8, members)


# The cut's part of the engine


def test_a_broadcast_is_not_complete_before_all_have_contributed(native: ModuleType) -> None:
    pair = Pair(native)
    pair.issue(0, Kind.BROADCAST, values=[1, 2], root=0)
    assert pair.settle() == []
    counts = pair.engines[0].counts(0)["7"]
    assert counts == {"contributed": 1, "completed": 0, "members": [0, 1]}
    pair.issue(1, Kind.BROADCAST, root=0)
    assert [rank for rank, *_ in pair.settle()] == [0, 1]


def test_beyond_the_target_is_held_until_resume(native: ModuleType) -> None:
    pair = Pair(native)
    for rank in (0, 1):
        pair.issue(rank, Kind.ALL_REDUCE, values=[1])
        pair.issue(rank, Kind.BARRIER)
    # Both have contributed 2: a coordinator that asks for 1 only gets 1.
    for engine in pair.engines:
        engine.set_targets({"7": 1})
    assert len(pair.settle()) == 2
    assert all(engine.finished() for engine in pair.engines)
    assert [p["number"] for p in pair.engines[0].pending(0)] == [2]
    for engine in pair.engines:
        engine.resume()
    assert len(pair.settle()) == 2
    assert not any(engine.finished() for engine in pair.engines)


def test_targets_that_cannot_be_are_refused(native: ModuleType) -> None:
    pair = Pair(native)
    for rank in (0, 1):
        pair.issue(rank, Kind.BARRIER)
    pair.settle()
    for wrong in (0, 2):
        with pytest.raises(native.CollectiveError, match=f"the target {wrong} is not between completed 1"):
            pair.engines[0].set_targets({"7": wrong})
    for text in ("", "x", "7:", "7:0>", "7:0>1>", "7:-1>2", "-7", "7 "):
        with pytest.raises(native.CollectiveError, match="does not name a sequence"):
            pair.engines[0].set_targets({text: 1})


def test_pending_send_and_receive_are_their_own_sequences(native: ModuleType) -> None:
    pair = Pair(native)
    pair.issue(0, Kind.SEND, values=[3], root=1)
    pair.issue(0, Kind.SEND, values=[4], root=1)
    pair.issue(1, Kind.RECV, root=0)
    pair.issue(0, Kind.BARRIER)
    done = pair.settle()
    assert [(rank, blocks) for rank, _, blocks, _ in done] == [(0, []), (1, [pack([np.array([3], np.float32)])])]
    assert {name: c["contributed"] for name, c in pair.engines[0].counts(0).items()} == {"7": 1, "7:0>1": 2}
    assert [(p["sequence"], p["number"]) for p in pair.engines[0].pending(0)] == [("7:0>1", 2), ("7", 1)]


def test_counts_are_restored_once_and_before_anything_is_issued(native: ModuleType) -> None:
    pair = Pair(native)
    pair.engines[0].restore_counts(0, {"7": 4, "7:0>1": 2})
    assert pair.engines[0].counts(0)["7:0>1"] == {"contributed": 2, "completed": 2, "members": [0, 1]}
    with pytest.raises(native.CollectiveError, match="restored after it has issued operations or twice"):
        pair.engines[0].restore_counts(0, {"7": 4})
    with pytest.raises(native.CollectiveError, match="communicator 9 is not defined"):
        pair.engines[0].restore_counts(0, {"9": 1})


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
    assert len(frame) == 88
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
    for length in (0, 5, 88 + 10):
        (engine, fabric), peer = raw_peer(native)
        frame = good_frames(native)
        if length > 88:
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
    with pytest.raises(native.FabricError, match=r"proxy 3 could not be reached at 127\.0\.0\.1:\d+ \(Connection refused\)"):
        native.Fabric(0).connect_tcp_peers([(3, False, "127.0.0.1", free_port())], b"t", 0.3)
    assert time.monotonic() - began >= 0.3


def test_strangers_do_not_disturb(native: ModuleType) -> None:
    port = free_port()
    ready: dict[int, str] = {}
    listener = threading.Thread(
        target=lambda: ready.update(connect_all(native, {0: two(port)[0]}, {0: b"t"}, 30))
    )
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
    assert "proxy 1 speaks fabric version 9, this build speaks 1" in found[0]
