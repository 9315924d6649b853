"""Whatever a rank writes into its ring, the proxy survives, says what is wrong and serves the others."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy_runtime.channel.ring import Ring
from proxy_runtime.device.client import Zygote, connect_fabric
from tests.proxy_runtime.device.producer import (
    INT64,
    NO_TEMPLATE,
    Message,
    Op,
    Producer,
    RemoteError,
    Tag,
    header_check,
    none_key,
    tensor_key,
    words,
)

PINNED = 1 << 16
NEG = Op("aten::neg", tensor_key([4]), [1])


@dataclass
class Crowd:
    """One proxy, and a fresh rank of it for every example."""

    new_rank: Callable[[], Producer]
    healthy: Producer
    handles: Iterator[int] = field(default_factory=lambda: count(10))

    def check(self) -> None:
        """The proxy still serves a rank that behaves."""
        handle = next(self.handles)
        self.healthy.execute(NEG, 0, base=handle)
        assert self.healthy.read_floats(handle, 4) == [-1, -2, -3, -4]
        self.healthy.free(handle)


@pytest.fixture(scope="module")
def crowd(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    most = 4000
    log = tmp_path_factory.mktemp("crowd") / "log"
    with zygote.fork(log) as proxy:
        connect_fabric([proxy], [0] * most)
        proxy.run()
        numbers = iter(range(most))
        last: list[Producer] = []

        def new_rank() -> Producer:
            number = next(numbers)
            ring = Ring.create(number, ring_bytes=1 << 16, response_bytes=1 << 13, pinned_bytes=PINNED)
            proxy.attach(number, ring.fd)
            while last and number > 1:
                old = last.pop()
                old.close()
                old.ring.close()
            producer = Producer(ring)
            if number > 0:
                last.append(producer)
            return producer

        healthy = new_rank()
        healthy.write_floats(1, [1, 2, 3, 4])
        healthy.define(NEG, template=0, base=2)
        yield Crowd(new_rank, healthy)
        assert proxy.alive
        healthy.close()
        healthy.ring.close()


def raw(kind: int, body: bytes, *, length: int | None = None, check: int | None = None) -> bytes:
    length = 8 + len(body) if length is None else length
    return struct.pack("=IHH", length, kind, header_check(length, kind) if check is None else check) + body


COO, CSR, NESTED = 0, 1, 5
ALLOC_1 = raw(Message.ALLOC, words(1, 16))


def composed(composition: int, geometry: list[int], *, sparse_dims: int = 0) -> bytes:
    """The key of a sparse or nested tensor without its components."""
    return words(Tag.COMPOSED | composition << 8 | sparse_dims << 16, len(geometry), *geometry)


def define_composed(key: bytes, handles: list[int] | None = None) -> bytes:
    return raw(Message.DEFINE, Op("aten::neg", key, handles or []).define_body(0, 2))


def expect_stopped(rank: Producer, because: str) -> None:
    rank._wait(lambda: rank.ring.proxy_gone)
    assert rank.ring.error is not None
    assert "stopped serving rank" in rank.ring.error and because in rank.ring.error, rank.ring.error


@pytest.mark.parametrize(
    ("message", "because"),
    [
        (raw(Message.SYNC, b"", check=1), "torn or foreign"),
        (raw(99, b""), "unknown message type 99"),
        (raw(Message.SYNC, b"", length=0), "impossible length 0"),
        (raw(Message.SYNC, b"", length=12) + b"\0" * 8, "impossible length 12"),
        (raw(Message.SYNC, b"", length=4096), "impossible length 4096"),
        (raw(Message.ALLOC, words(1)), "shorter than"),
        (raw(Message.FREE, words(1, 2)), "longer than its type"),
        (raw(Message.WRITE, words(1, 0, 2**60)), "shorter than"),
        (raw(Message.READ, words(1, 0, 1 << 40)), "response area"),
        (raw(Message.EXEC, words(7, 0, 0, 0)), "template 7 is unknown"),
        (raw(Message.EXEC, words(0, 0, 2**62, 0)), "shorter than"),
        (raw(Message.DEFINE, NEG.define_body(3, 2)), "template 3 was defined where 0 is next"),
        (raw(Message.DEFINE, Op("neg", tensor_key([4]), [1]).define_body(0, 2)), "without namespace"),
        (raw(Message.DEFINE, Op("aten::neg", words(200), [1]).define_body(0, 2)), "unknown argument tag 200"),
        (raw(Message.DEFINE, Op("aten::neg", none_key(), []).define_body(0, 2)), "was sent with tag"),
        (raw(Message.DEFINE, Op("aten::neg", tensor_key([4]) * 2, [1]).define_body(0, 2)), "more words than arguments"),
        (
            ALLOC_1 + raw(Message.DEFINE, Op("aten::neg", tensor_key([4]), [1, 1]).define_body(0, 2)),
            "more words than its template",
        ),
        (raw(Message.DEFINE, Op("aten::neg", tensor_key([-1]), [1]).define_body(0, 2)), "negative size"),
        (raw(Message.DEFINE, Op("aten::neg", tensor_key([2**40, 2**40]), [1]).define_body(0, 2)), "impossible size"),
        (raw(Message.DEFINE, Op("aten::neg", tensor_key([4], dtype=250), [1]).define_body(0, 2)), "unknown dtype"),
        (raw(Message.DEFINE, Op("aten::neg", words(Tag.SAME_TENSOR), []).define_body(0, 2)), "not there"),
        (raw(Message.ALLOC, words(5, 8)) + raw(Message.ALLOC, words(5, 8)), "handle 5"),
        (raw(Message.SEED, words(9, 1)), "unknown generator 9"),
        (raw(Message.NEW_GENERATOR, words(0)), "a second time"),
        (raw(Message.FLAGS, words(2, 0, 0)), "flags message"),
        (raw(Message.COMMUNICATOR, words(1, 0, 2, 3999, 3998)), "not the member it says"),
        (raw(Message.COMMUNICATOR, words(1, 0, 1, 10**9)), "names rank"),
        (raw(Message.COLLECTIVE, words(1, 0, 0, 0, 0, 0, 0)), "unknown communicator"),
        (raw(Message.COLLECTIVE, words(1, 77, 0, 0, 0, 0, 0)), "unknown kind"),
        (raw(Message.STORE, words(4) + b"\1\0\0\0\0\0\0\0"), "store request"),
        (raw(Message.READY, words(2, 1)), "shorter than"),
        (raw(Message.READY, words(2**63, 1)), "shorter than"),
        (raw(Message.DEVICE_INFO, words(1)), "longer than its type"),
        (raw(Message.SYNC, words(1)), "longer than its type"),
        (raw(Message.STATS, words(1)), "longer than its type"),
        (raw(Message.EXIT, words(1)), "longer than its type"),
        (raw(Message.MARK, b""), "shorter than"),
        (raw(Message.MARK, words(1, 2)), "longer than its type"),
        (raw(Message.UNMARK, words(1, 2)), "longer than its type"),
        (raw(Message.ELAPSED, words(1)), "shorter than"),
        (raw(Message.PULL, words(1, 0, 8)), "shorter than"),
        (raw(Message.PULL, words(1, 0, 8, 1 << 13)), "response area"),
        (raw(Message.PULL, words(1, 0, 2**64 - 8, 16)), "response area"),
        (raw(Message.FREE_GENERATOR, words(0)), "generator 0"),
        (raw(Message.FREE_GENERATOR, words(9)), "generator 9"),
        (raw(Message.PULL_PINNED, words(1, 0, 8)), "shorter than"),
        (raw(Message.PULL_PINNED, words(1, 0, 8, PINNED)), "pinned memory"),
        (raw(Message.PUSH_PINNED, words(1, 0, 2**64 - 8, 16)), "pinned memory"),
        (raw(Message.LIBRARY, words(1, 2)), "shorter than"),
        (raw(Message.LIBRARY, words(1, 2, 2**63)), "shorter than"),
        (raw(Message.LIBRARY, words(1, 2, 1, ord("x"), 5)), "more words than it says"),
        (raw(Message.LIBRARY_PART, words(4, 2, 1, ord("x"), 8, 0)), "more of a library than its size"),
        (raw(Message.LIBRARY_PART, words(8, 2, 1, ord("x"), 8, 0)), "other contents"),
        (raw(Message.LIBRARY_PART, words(8, 2, 1, ord("x"), 2**62, 0)), "shorter than"),
        (raw(Message.RESET, b""), "not shared"),
        (define_composed(composed(COO, [1] * 300)), "a sparse tensor of 300 dims"),
        (define_composed(composed(COO, [4], sparse_dims=2)), "a sparse tensor of 1 dims"),
        (define_composed(composed(9, [])), "unknown composition"),
        (define_composed(words(Tag.COMPOSED, 99)), "geometry longer"),
        (define_composed(composed(COO, [-4], sparse_dims=1)), "negative size"),
        (define_composed(composed(CSR, [2, 2]) + none_key() * 3), "without components"),
        (define_composed(composed(COO, [4], sparse_dims=1) * 40), "too deeply"),
        (
            ALLOC_1 + define_composed(composed(NESTED, [2, 1, 4, 4]) + tensor_key([4]), [1]),
            "impossible geometry",
        ),
    ],
)
def test_a_malformed_message_ends_its_rank_with_the_reason(crowd: Crowd, message: bytes, because: str) -> None:
    rank = crowd.new_rank()
    rank.put(message)
    expect_stopped(rank, because)
    crowd.check()


@pytest.mark.parametrize(
    ("kind", "body", "because"),
    [
        (Message.ELAPSED, words(1, 2), "not recorded"),
        (Message.READ, words(1, 8, 16), "does not fit"),
        (Message.LIBRARY, words(3, 5, 4) + b"none\0\0\0\0", None),
        (Message.LIBRARY, words(2**40, 5, 9) + b"/dev/zero\0\0\0\0\0\0\0", None),
        (Message.LIBRARY, words(0, 5, 0), None),
        (
            Message.DEFINE,
            Op(
                "aten::neg",
                composed(COO, [4], sparse_dims=1) + tensor_key([1, 1], dtype=INT64) + tensor_key([4]),
                [1, 1],
            ).define_body(0, 2),
            "same nnz",
        ),
    ],
)
def test_what_is_only_wrong_is_answered_and_the_rank_goes_on(
    crowd: Crowd, kind: Message, body: bytes, because: str | None
) -> None:
    rank = crowd.new_rank()
    rank.alloc(1, 16)
    if because is None:
        assert rank.call(kind, body) == b"\0"  # the contents are needed
    else:
        with pytest.raises(RemoteError, match=because):
            rank.call(kind, body)
    assert rank.read(1, 8) is not None and not rank.ring.proxy_gone
    crowd.check()


def test_pinned_memory_is_read_and_written_where_it_is_asked_for(crowd: Crowd) -> None:
    rank = crowd.new_rank()
    pinned = rank.pinned(PINNED)
    rank.write_floats(1, [1, 2, 3, 4])
    rank.send(Message.PULL_PINNED, words(1, 4, 8, PINNED - 8))
    rank.call(Message.SYNC)
    assert struct.unpack("=ff", pinned[-8:]) == (2, 3)
    pinned[:4] = struct.pack("=f", 9)
    rank.send(Message.PUSH_PINNED, words(1, 12, 4, 0))
    assert rank.read_floats(1, 4) == [1, 2, 3, 9]
    for kind in (Message.PULL_PINNED, Message.PUSH_PINNED):
        rank.send(kind, words(1, 12, 8, 0))
        with pytest.raises(RemoteError, match="does not fit"):
            rank.call(Message.READ, words(1, 12, 8))
        assert "does not fit" in (rank.take_error() or "")
    pinned.release()
    crowd.check()


def test_a_waiting_rank_gets_the_reason_as_its_answer(crowd: Crowd) -> None:
    rank = crowd.new_rank()
    with pytest.raises(RemoteError, match=r"stopped serving rank .* flags message"):
        rank.call(Message.FLAGS, words(1, 0))
    crowd.check()


def test_impossible_ring_positions(crowd: Crowd) -> None:
    rank = crowd.new_rank()
    rank._advance(1 << 20)  # more than the ring has
    expect_stopped(rank, "beyond its end")
    crowd.check()


word = st.one_of(
    st.integers(0, 25),
    st.sampled_from([Tag.COMPOSED | composition << 8 | 1 << 16 for composition in range(6)]),
    st.sampled_from([tag | 6 << 8 | 1 << 16 | 1 << 24 for tag in (Tag.TENSOR, Tag.CPU_TENSOR)]),
    st.sampled_from([Tag.LIST | 2 << 8 | 1 << 40, Tag.INT_LIST | 2 << 8, Tag.STRING | 9 << 8, 2**32, 2**63, 2**64 - 1]),
    st.integers(0, 2**64 - 1),
)
bodies = st.lists(word, max_size=24).map(lambda values: words(*values))
kinds = st.sampled_from([m for m in Message if m is not Message.EXIT])


@st.composite
def definitions(draw: st.DrawFn) -> bytes:
    """Definitions whose framing is right and whose keys, handles and payloads are not."""
    name = draw(
        st.sampled_from(
            ["aten::neg", "aten::add.Tensor", "aten::cat", "aten::index.Tensor", "aten::sum.dim_IntList", "aten::rand"]
        )
    )
    op = Op(name, draw(bodies), draw(st.lists(st.integers(0, 3), max_size=3)), draw(bodies))
    return op.define_body(draw(st.sampled_from([0, NO_TEMPLATE])), draw(st.integers(0, 40)))


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    messages=st.lists(
        st.one_of(st.tuples(kinds, bodies), st.tuples(st.just(Message.DEFINE), definitions())), max_size=6
    )
)
def test_any_words_in_any_message(crowd: Crowd, messages: list[tuple[Message, bytes]]) -> None:
    rank = crowd.new_rank()
    rank.write_floats(1, [1, 2, 3, 4])
    for kind, body in messages:
        rank.send(kind, body)
    crowd.check()


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=8, max_size=256))
def test_any_bytes_at_all(crowd: Crowd, data: bytes) -> None:
    rank = crowd.new_rank()
    rank.put(data[: len(data) - len(data) % 8])
    crowd.check()
