"""Collectives between real processes over shared memory and TCP; what the engine refuses; its part of a cut."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.native.build import fabric_module
from tests.proxy_runtime.cut.program import SUM, Call, Kind, evaluate, pack, random_program
from tests.proxy_runtime.device.fabric_helpers import F32, Pair, free_port

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "a token of the job"
TIMEOUT_S = 60.0


@pytest.fixture(scope="session")
def native() -> ModuleType:
    return fabric_module()


# Between processes


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
    return subprocess.Popen(command, cwd=ROOT, pass_fds=fds, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


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
    calls = [step for step in program.steps[20:] if isinstance(step, Call)]
    index = next(call.index for call in calls if call.kind == Kind.ALL_REDUCE and call.comm == 7)
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
    assert all("of the same size and dtype" in error for *_, error in done)


def test_a_reduction_that_the_dtype_lacks_is_an_error_at_all_members(native: ModuleType) -> None:
    for count in (3, 40_000):  # whole and in chunks
        pair = Pair(native)
        pair.issue(0, Kind.ALL_REDUCE, values=[1.0] * count, op=5)
        pair.issue(1, Kind.ALL_REDUCE, values=[1.0] * count, op=5)
        done = pair.settle()
        assert len(done) == 2
        assert all("not defined for floating point" in error for *_, error in done)


def test_a_kernel_that_fails_in_one_owners_chunk_is_an_error_at_all_members(native: ModuleType) -> None:
    pair = Pair(native)
    # Bitwise "and": the integers, reduced by proxy 0, have it; the floats at the end, reduced by proxy 1, do not.
    arrays = [np.ones(40_000, np.int32), np.ones(10, np.float32)]
    for rank in (0, 1):
        segments = [(3, 4, arrays[0].nbytes), (F32, 4, arrays[1].nbytes)]
        pair.engines[rank].issue(rank, 7, Kind.ALL_REDUCE, 5, 0, segments, pack(arrays), 0)
    errors = [error for *_, error in pair.settle()]
    assert len(errors) == 2
    assert len(set(errors)) == 1
    assert "not defined for floating point" in errors[0]


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
