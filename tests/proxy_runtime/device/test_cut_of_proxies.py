"""Stop, finish, dump, load and resume, with collectives and store requests in every state."""

from __future__ import annotations

import random
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from proxy_runtime.device.client import DeviceProxyError
from tests.proxy_runtime.device.producer import Message, Op, Producer, RemoteError, Tag, tensor_key, words
from tests.proxy_runtime.device.test_execution import add, random_op

ALL_REDUCE = 0
SET, GET, ADD = 0, 1, 2


def all_reduce(rank: Producer, handle: int, n: int = 4) -> None:
    tensor = [(tensor_key([n]), handle)]
    rank.collective(7, ALL_REDUCE, tensor, tensor)


def wait_for(condition, what: str, deadline_s: float = 20.0) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.001)


def code_of(error: pytest.ExceptionInfo[DeviceProxyError]) -> str:
    return error.value.code


def test_everything_of_a_rank_survives_a_move(job) -> None:
    one = job([0])
    rank = one.ranks[0]
    rank.write_floats(1, [1, 2, 3, 4])
    rank.write_floats(2, [1, 1, 1, 1])
    rank.define(add(1, 2), template=0, base=3)
    rank.define(random_op(8), template=1, base=4)
    rank.send(Message.NEW_GENERATOR, words(3))
    rank.send(Message.SEED, words(3, 11))
    rank.store(SET, b"key", b"value")
    states = [rank.call(Message.GET_RNG, words(i)) for i in (0, 3)]
    rank.step(12)
    rank.sync()
    one.cut()
    one.move()
    assert [rank.call(Message.GET_RNG, words(i)) for i in (0, 3)] == states
    assert rank.read_floats(3, 4) == [2, 3, 4, 5]
    rank.execute(add(3, 2), 0, base=5)
    assert rank.read_floats(5, 4) == [3, 4, 5, 6]
    assert rank.store(GET, b"key") == b"\1value"
    assert one.stop()[0]["step"] == 12


def test_messages_behind_the_cut_are_executed_by_the_next_proxy(job) -> None:
    one = job([0])
    rank = one.ranks[0]
    rank.write_floats(1, [1, 2, 3, 4])
    rank.write_floats(2, [1, 1, 1, 1])
    rank.define(add(1, 2), template=0, base=3)
    one.cut()
    for i in range(100):
        rank.execute(add(3 + i, 2), 0, base=4 + i)
    one.move()
    assert rank.read_floats(103, 4) == [102, 103, 104, 105]


def test_a_pending_collective_is_contributed_again(job) -> None:
    two = job([0, 1])
    for index, rank in enumerate(two.ranks):
        rank.communicator(7, index, [0, 1])
        rank.write_floats(1, [index + 1.0] * 4)
        all_reduce(rank, 1)
    first, second = two.ranks
    second.sync()
    all_reduce(first, 1)
    first.free(1)  # does not wait; the operation keeps its storage
    first.step(1)  # neither does this
    wait_for(lambda: first.ring.step_done == 1, "the step was not executed")
    finished = two.cut()
    assert [f["pending_operations"] for f in finished] == [1, 0]
    assert finished[0]["completed"] == {"7": {"0": 1}}
    two.move()
    all_reduce(second, 1)
    assert second.read_floats(1, 4) == [6, 6, 6, 6]
    first.sync()
    reports = two.stop()
    assert {r["comms"]["7"]["completed"] for r in reports.values()} == {2}


def test_a_queue_waits_for_the_storage_that_it_touches_and_no_longer(job) -> None:
    two = job([0, 1])
    first, second = two.ranks
    for index, rank in enumerate(two.ranks):
        rank.communicator(7, index, [0, 1])
        rank.write_floats(1, [1] * 4)
        rank.write_floats(2, [5] * 4)
        rank.define(add(2, 2), template=0, base=3)
    all_reduce(first, 1)
    first.execute(add(2, 2), 0, base=4)  # touches nothing pending
    assert first.read_floats(4, 4) == [10] * 4
    first.step(1)
    first.execute(add(1, 2), 0, base=5)
    first.step(2)
    wait_for(lambda: first.ring.step_done == 1, "the first step was not executed")
    assert two.stop()[0]["step"] == 1
    for proxy in two.proxies:
        proxy.resume()
    all_reduce(second, 1)
    assert first.read_floats(5, 4) == [7] * 4
    assert first.ring.step_done == 2


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_store_is_reached_from_every_proxy_and_moves_with_rank_0(job, transport: str) -> None:
    two = job([0, 1], transport)
    first, second = two.ranks
    assert second.store(SET, b"a", b"1234") == b"\1"
    assert first.store(GET, b"a") == b"\0011234"
    assert second.store(ADD, b"n", number=5) == b"\1" + struct.pack("=q", 5)
    assert second.store(GET, b"nothing") == b"\0"
    two.cut()
    two.move()
    assert second.store(ADD, b"n", number=2) == b"\1" + struct.pack("=q", 7)
    assert first.store(GET, b"n") == b"\0017"


def test_a_store_request_under_way_at_the_stop_is_answered(job) -> None:
    for attempt in range(20):
        two = job([0, 1])
        before = two.ranks[1].ring.response_seq
        request = struct.pack("=BI", ADD, 1) + b"n" + struct.pack("=Iq", 0, 1)
        two.ranks[1].send(Message.STORE, words(len(request)) + request + b"\0" * (-len(request) % 8))
        time.sleep(attempt * 1e-4)
        two.cut()
        two.move()
        assert two.ranks[1].answer(before) == b"\1" + struct.pack("=q", 1)
        assert two.ranks[0].store(GET, b"n") == b"\0011"  # once, not twice
        two.close()


def test_stopping_at_a_step(job) -> None:
    one = job([0])
    rank, proxy = one.ranks[0], one.proxies[0]
    proxy.stop()
    for n in range(1, 6):
        rank.step(n)
    proxy.resume()
    assert proxy.stop(at_step=3, deadline_s=10)["reached"] is True or rank.ring.step_done >= 3
    proxy.resume()
    wait_for(lambda: rank.ring.step_done == 5, "the remaining steps were not executed")
    reply = proxy.stop(at_step=9, deadline_s=0.2)
    assert reply["reached"] is False and reply["ranks"]["0"]["step"] == 5
    rank.step(6)
    proxy.resume()
    rank.sync()
    assert rank.ring.step_done == 6


def test_it_stops_right_after_the_step(job) -> None:
    one = job([0])
    rank, proxy = one.ranks[0], one.proxies[0]
    rank.write_floats(1, [0] * (1 << 12))
    square = Op("aten::mul_.Scalar", tensor_key([1 << 12]) + words(Tag.SCALAR_INT), [1], words(2))
    rank.define(square, template=0)
    reply: dict = {}
    waiting = threading.Thread(target=lambda: reply.update(proxy.stop(at_step=2, deadline_s=20)))
    waiting.start()
    for n in range(1, 5):
        rank.execute(square, 0)
        rank.step(n)
    waiting.join()
    assert reply["reached"] and reply["ranks"]["0"]["step"] >= 2
    assert rank.ring.step_done == reply["ranks"]["0"]["step"]


def test_a_stopped_proxy_takes_no_message_until_it_is_resumed(job) -> None:
    one = job([0])
    rank = one.ranks[0]
    rank.sync()
    one.stop()
    tail = rank.ring.tail
    before = rank.ring.response_seq
    rank.send(Message.SYNC)
    assert one.proxies[0].stats()["stopped"] is True
    assert rank.ring.tail == tail and rank.ring.response_seq == before
    one.proxies[0].resume()
    assert rank.answer(before) == b""


def test_requests_out_of_order_are_refused(job) -> None:
    one = job([0])
    proxy = one.proxies[0]
    with pytest.raises(DeviceProxyError) as error:
        proxy.finish({})
    assert code_of(error) == "device-proxy.order"
    with pytest.raises(DeviceProxyError) as error:
        proxy.dump(0, one.directory / "m", one.directory / "s")
    assert code_of(error) == "device-proxy.order"
    with pytest.raises(DeviceProxyError) as error:
        proxy.attach(0, one.ranks[0].ring.fd)
    assert code_of(error) in ("device-proxy.order", "device-proxy.rank")
    one.stop()
    with pytest.raises(DeviceProxyError) as error:
        proxy.finish({"nonsense": 1})
    assert code_of(error) == "device-proxy.targets"
    with pytest.raises(DeviceProxyError) as error:
        proxy.dump(0, one.directory / "missing" / "m", one.directory / "missing" / "s")
    assert code_of(error) == "device-proxy.dump"
    proxy.resume()
    one.ranks[0].sync()


@pytest.mark.parametrize("kind", ["meta", "storages"])
def test_a_damaged_dump_is_one_clear_error(job, kind: str) -> None:
    one = job([0])
    rank = one.ranks[0]
    rank.write_floats(1, [1, 2, 3, 4])
    rank.define(Op("aten::neg", tensor_key([4]), [1]), template=0, base=2)
    one.cut()
    meta, storages = one.files(0)
    good = {path: path.read_bytes() for path in (meta, storages)}
    chooser = random.Random(5)
    damages = {
        "cut off": lambda data: data[: len(data) // 2 // 8 * 8],
        "empty": lambda data: b"",
        "missing": None,
    }
    if kind == "meta":
        for _ in range(8):
            at = chooser.randrange(len(good[meta]))
            damages[f"flip {at}"] = lambda data, at=at: data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
    victim = meta if kind == "meta" else storages
    for name, damage in damages.items():
        for path, data in good.items():
            path.write_bytes(data)
        if damage is None:
            victim.unlink()
        else:
            victim.write_bytes(damage(good[victim]))
        with pytest.raises(DeviceProxyError) as error:
            one.move()
        assert code_of(error) == f"device-proxy.{kind}", name
        assert str(victim) in error.value.message
    for path, data in good.items():
        path.write_bytes(data)
    one.move()
    assert rank.read_floats(2, 4) == [-1, -2, -3, -4]


def test_storages_are_written_once_and_aligned(job) -> None:
    one = job([0])
    rank = one.ranks[0]
    for handle in range(3):
        rank.alloc(10 + handle, 5000)
        rank.write(10 + handle, bytes([handle + 1]) * 5000)
    rank.sync()
    one.stop()
    size = one.proxies[0].dump(0, one.directory / "m", one.directory / "s")
    data = Path(one.directory / "s").read_bytes()
    assert size == len(data) == 3 * 8192
    assert sorted({data[at] for at in range(0, size, 8192)}) == [1, 2, 3]


@pytest.mark.parametrize("seed", range(3))
def test_random_cuts_of_collectives_change_no_bit(job, seed: int) -> None:
    """Three ranks on two proxies; a cut at a random message, then on with another placement."""
    chooser = random.Random(seed)
    rounds, n = 12, 16
    expected: list[list[float]] = [[float(rank + 1)] * n for rank in range(3)]
    three = job([0, 0, 1])
    for index, rank in enumerate(three.ranks):
        rank.communicator(7, index, [0, 1, 2])
        rank.write_floats(1, expected[index])
        rank.write_floats(2, [0.5 + index] * n)
        rank.define(Op("aten::mul_.Tensor", tensor_key([n]) * 2, [1, 2]), template=0)
    halves = [struct.unpack("=f", struct.pack("=f", 0.5 + index))[0] for index in range(3)]
    for index in range(3):
        expected[index] = [value * halves[index] for value in expected[index]]
    sent = [0, 0, 0]
    cuts = sorted(chooser.sample(range(3 * rounds), 3))
    done = 0
    while min(sent) < rounds:
        index = chooser.choice([i for i in range(3) if sent[i] < rounds])
        rank = three.ranks[index]
        all_reduce(rank, 1, n)
        rank.execute(Op("", b"", [1, 2]), 0)
        sent[index] += 1
        done += 1
        if done in cuts:
            three.cut()
            three.move(chooser.choice([[0, 0, 1], [0, 1, 1], [0, 0, 0], [0, 1, 2]]))
    for _ in range(rounds):
        arrays = [np.array(values, dtype=np.float32) for values in expected]
        total = (arrays[0] + arrays[1]) + arrays[2]
        expected = [list(total * np.float32(half)) for half in halves]
    for index, rank in enumerate(three.ranks):
        assert rank.read_floats(1, n) == expected[index]
        assert rank.take_error() is None


def test_a_lost_peer_ends_the_ranks_that_wait_for_it(job) -> None:
    two = job([0, 1], "tcp")  # a killed peer on shared memory is found by the shim, from its pidfd
    first = two.ranks[0]
    for index, rank in enumerate(two.ranks):
        rank.communicator(7, index, [0, 1])
        rank.write_floats(1, [1] * 4)
        rank.sync()
    all_reduce(first, 1)
    two.proxies[1].kill()
    with pytest.raises(RemoteError, match="proxy 1"):
        first.read_floats(1, 4)
    assert first.ring.proxy_gone


def test_a_rank_that_has_ended_does_not_hold_up_a_cut(job) -> None:
    two = job([0, 0])
    first, second = two.ranks
    first.send(Message.EXIT)
    second.step(4)
    second.sync()
    reply = two.proxies[0].stop(at_step=4, deadline_s=20)
    assert reply["reached"] is True
    assert [reply["ranks"][rank]["exited"] for rank in ("0", "1")] == [True, False]
    two.proxies[0].resume()
    second.sync()


def test_an_asynchronous_error_waits_through_a_move(job) -> None:
    one = job([0])
    rank = one.ranks[0]
    rank.write_floats(1, [1, 2, 3, 4])
    rank.define(Op("aten::neg", tensor_key([4]), [1]), template=0, base=2)
    rank.execute(Op("", b"", [99]), 0, base=3)
    one.cut()
    one.move()
    rank.sync()
    assert "storage 99 does not exist" in (rank.take_error() or "")
