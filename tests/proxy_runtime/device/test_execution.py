"""What one rank can ask of its proxy: storages, operators, templates, errors, generators."""

from __future__ import annotations

import json
import struct

import pytest
import torch

from tests.proxy_runtime.device.producer import (
    FLOAT32,
    GLOBALS,
    INT64,
    Message,
    Op,
    Producer,
    RemoteError,
    Tag,
    none_key,
    real,
    tensor_key,
    words,
)

ADD = Op("aten::add.Tensor", tensor_key([4]) + tensor_key([4]) + words(Tag.SCALAR_INT), [1, 2], words(2))
RUNTIME, NOT_IMPLEMENTED, INDEX = 1, 2, 3


def add(first: int, second: int, alpha: int = 1) -> Op:
    return Op(ADD.name, ADD.key, [first, second], words(alpha))


def stats(rank: Producer) -> dict:
    return json.loads(rank.call(Message.STATS))


def test_bytes_come_back_as_they_were_written(rank: Producer) -> None:
    rank.alloc(1, 100)
    rank.write(1, bytes(range(50)), offset=50)
    rank.write(1, b"x" * 50)
    assert rank.read(1, 60, offset=40) == b"x" * 10 + bytes(range(50))


def test_resize_keeps_contents_and_free_forgets(rank: Producer) -> None:
    rank.alloc(1, 8)
    rank.write(1, b"abcdefgh")
    rank.resize(1, 16)
    rank.write(1, b"ijklmnop", offset=8)
    rank.resize(1, 12)
    assert rank.read(1, 12) == b"abcdefghijkl"
    rank.free(1)
    with pytest.raises(RemoteError, match="storage 1 does not exist"):
        rank.read(1, 1)
    assert stats(rank)["storages"] == 0


def test_a_definition_executes_and_describes_its_results(rank: Producer) -> None:
    rank.write_floats(1, [1, 2, 3, 4])
    rank.write_floats(2, [10, 20, 30, 40])
    spec = rank.define(ADD, template=0, base=3)
    new = 3  # OutKind
    assert spec == [1, 16, 1, ord("T"), new | FLOAT32 << 8 | 1 << 16, 0, 4, 1, 0, 0]
    assert rank.read_floats(3, 4) == [21, 42, 63, 84]
    rank.execute(add(3, 1, 10), 0, base=4)
    assert rank.read_floats(4, 4) == [31, 62, 93, 124]
    assert stats(rank)["templates"] == 1


def test_in_place_views_and_resized_outputs_are_described(rank: Producer) -> None:
    rank.write_floats(1, [1, 2, 3, 4])
    in_place = Op("aten::mul_.Scalar", tensor_key([4]) + words(Tag.SCALAR_INT), [1], words(3))
    assert rank.define(in_place) == [0, 1, ord("T"), 1 | FLOAT32 << 8 | 1 << 16, 0, 4, 1, 0, 0]
    view = Op("aten::slice.Tensor", tensor_key([4]) + words(*[v for n in (0, 1, 4, 1) for v in (Tag.INT, n)]), [1])
    assert rank.define(view) == [0, 1, ord("T"), 2 | FLOAT32 << 8 | 1 << 16, 1, 3, 1, 0, 0]
    rank.alloc(2, 0)
    resized = Op("aten::neg.out", tensor_key([4]) + tensor_key([0]), [1, 2])
    out = 1 | FLOAT32 << 8 | 1 << 16 | 1 << 32
    assert rank.define(resized) == [0, 1, ord("T"), out, 0, 4, 1, 1, 1, 16, out, 0, 4, 1, 0]
    assert rank.read_floats(2, 4) == [-3, -6, -9, -12]


def test_one_off_definitions_are_not_kept(rank: Producer) -> None:
    rank.write_floats(1, [1, 2, 3, 4])
    rank.write_floats(2, [1, 1, 1, 1])
    rank.define(ADD, base=3)
    rank.define(ADD, base=4)
    assert stats(rank)["templates"] == 0


def test_a_definition_that_fails_registers_nothing(rank: Producer) -> None:
    rank.write_floats(1, [1, 2, 3, 4])
    rank.write_floats(2, [1, 1, 1, 1])
    with pytest.raises(RemoteError, match=r"size mismatch|must match|shapes") as error:
        rank.define(Op("aten::mm", tensor_key([2, 2]) + tensor_key([1, 4]), [1, 2]), template=0, base=3)
    assert error.value.status == RUNTIME
    rank.define(ADD, template=0, base=3)  # the same id, the same base
    assert rank.read_floats(3, 4) == [3, 4, 5, 6]


def test_unknown_operators_are_refused(rank: Producer) -> None:
    with pytest.raises(RemoteError, match="custom::thing has no kernel") as error:
        rank.define(Op("custom::thing", b""))
    assert error.value.status == NOT_IMPLEMENTED


def test_an_asynchronous_error_is_kept_until_it_is_taken(rank: Producer) -> None:
    rank.write_floats(1, [1, 2, 3, 4])
    rank.alloc(2, 16)
    rank.write(2, struct.pack("=2q", 0, 1))
    pick = Op("aten::index_select", tensor_key([4]) + words(Tag.INT, 0) + tensor_key([2], dtype=INT64), [1, 2])
    rank.define(pick, template=0, base=3)
    rank.write(2, struct.pack("=2q", 0, 99))
    rank.execute(pick, 0, base=4)  # fails: 99
    rank.execute(add(4, 1), 0, base=5)  # its own error is a consequence and is not kept
    rank.sync()
    assert "out of range" in (rank.take_error() or "")
    with pytest.raises(RemoteError, match="storage 4 does not exist; it is the result of an operation that failed"):
        rank.read(4, 4)
    rank.write(2, struct.pack("=2q", 3, 3))
    rank.execute(pick, 0, base=6)
    assert rank.read_floats(6, 2) == [4, 4]
    assert rank.take_error() is None


def test_a_tensor_beyond_its_storage_is_an_error(rank: Producer) -> None:
    rank.write_floats(1, [1, 2, 3, 4])
    with pytest.raises(RemoteError, match="reaches 20 bytes into a device storage of 16 bytes"):
        rank.define(Op("aten::neg", tensor_key([5]), [1]), base=2)
    with pytest.raises(RemoteError, match="does not fit"):
        rank.read(1, 8, offset=12)


def test_lists_scalars_and_host_tensors_arrive(rank: Producer) -> None:
    rank.write_floats(1, [1, 2])
    rank.write_floats(2, [3, 4])
    tensors = words(Tag.LIST | 2 << 8 | 1 << 40) + tensor_key([2]) * 2
    rank.define(Op("aten::cat", tensors + words(Tag.INT, 0), [1, 2]), base=3)
    assert rank.read_floats(3, 4) == [1, 2, 3, 4]
    host = words(Tag.CPU_TENSOR | FLOAT32 << 8 | 1 << 24)
    rank.define(Op("aten::mul_.Tensor", tensor_key([2]) + host, [1], struct.pack("=fxxxx", 2.5)))
    assert rank.read_floats(1, 2) == [2.5, 5]
    index = words(Tag.LIST | 2 << 8 | 2 << 40) + none_key() + tensor_key([1], dtype=INT64)
    rank.alloc(4, 8)
    rank.write(4, struct.pack("=q", 1))
    rank.define(Op("aten::index.Tensor", tensor_key([2, 2]) + index, [3, 4]), base=5)
    assert rank.read_floats(5, 2) == [2, 4]


def test_the_default_dtype_of_a_template_is_its_own(rank: Producer) -> None:
    float64 = 7
    rank.alloc(1, 16)
    rank.write(1, struct.pack("=2q", 3, 4))
    divide = Op("aten::div.Scalar", tensor_key([2], dtype=INT64) + words(Tag.SCALAR_INT), [1], words(2))
    double = rank.call(Message.DEFINE, divide.define_body(0, 2, globals_word=float64))
    single = rank.call(Message.DEFINE, divide.define_body(1, 3, globals_word=GLOBALS))
    assert struct.unpack_from("=Q", double, 8)[0] == 16
    assert struct.unpack_from("=Q", single, 8)[0] == 8
    rank.execute(divide, 0, base=4)  # back to the other default
    assert struct.unpack("=2d", rank.read(4, 16)) == (1.5, 2.0)


def random_op(n: int) -> Op:
    return Op("aten::rand", words(Tag.INT_LIST | 1 << 8, n) + none_key() * 4)


def test_random_numbers_are_those_of_torch(rank: Producer) -> None:
    rank.send(Message.SEED, words(0, 1234))
    rank.define(random_op(64), base=1)
    torch.manual_seed(1234)
    assert rank.read(1, 256) == torch.rand(64).numpy().tobytes()
    rank.send(Message.NEW_GENERATOR, words(5))
    rank.send(Message.SEED, words(5, 77))
    with_generator = Op(
        "aten::rand.generator", words(Tag.INT_LIST | 1 << 8, 64, Tag.GENERATOR) + none_key() * 4, [], words(5)
    )
    rank.define(with_generator, base=2)
    assert rank.read(2, 256) == torch.rand(64, generator=torch.Generator().manual_seed(77)).numpy().tobytes()


def test_a_generator_goes_back_to_a_saved_state(rank: Producer) -> None:
    rank.send(Message.SEED, words(0, 5))
    state = rank.call(Message.GET_RNG, words(0))
    rank.define(random_op(8), template=0, base=1)
    rank.send(Message.SET_RNG, words(0, len(state)) + state + b"\0" * (-len(state) % 8))
    rank.execute(random_op(8), 0, base=2)
    assert rank.read(1, 32) == rank.read(2, 32)


def test_each_rank_of_a_proxy_has_its_own_default_generator(job) -> None:
    ranks = job([0, 0]).ranks
    # native_dropout has no generator argument: it takes the process's default.
    dropout = Op("aten::native_dropout", tensor_key([64]) + words(Tag.FLOAT, Tag.BOOL | 1 << 8), [1], real(0.5))
    expected = []
    for index, rank in enumerate(ranks):
        rank.send(Message.SEED, words(0, 100 + index))
        rank.write_floats(1, [1.0] * 64)
        torch.manual_seed(100 + index)
        expected.append([torch.native_dropout(torch.ones(64), 0.5, True)[0].numpy().tobytes() for _ in range(4)])
    for rank in ranks:
        rank.define(dropout, template=0, base=10)
    for turn in range(1, 4):
        for rank in ranks:
            rank.execute(dropout, 0, base=10 + 2 * turn)
            rank.sync()
    for rank, draws in zip(ranks, expected, strict=True):
        assert [rank.read(10 + 2 * turn, 256) for turn in range(4)] == draws


def test_operators_that_only_cuda_has_run_on_the_cpu(rank: Producer) -> None:
    torch.manual_seed(0)
    x, w, g = torch.randn(3, 4), torch.randn(4), torch.randn(3, 4)
    rstd = (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    for handle, tensor in enumerate((g, x, rstd, w), start=1):
        rank.write_floats(handle, tensor.flatten().tolist())
    key = tensor_key([3, 4]) * 2 + words(Tag.INT_LIST | 1 << 8, 4) + tensor_key([3, 1]) + tensor_key([4])
    rank.define(Op("aten::_fused_rms_norm_backward", key + words(Tag.BOOL_LIST | 2 << 8, 1, 1), [1, 2, 3, 4]), base=5)
    x.requires_grad_(), w.requires_grad_()
    torch.nn.functional.rms_norm(x, [4], w, 1e-6).backward(g)
    assert x.grad is not None and w.grad is not None
    assert torch.allclose(torch.tensor(rank.read_floats(5, 12)).view(3, 4), x.grad, atol=1e-6)
    assert torch.allclose(torch.tensor(rank.read_floats(6, 4)), w.grad, atol=1e-6)


def test_more_messages_than_the_ring_holds(rank: Producer) -> None:
    rank.write_floats(1, [1, 2, 3, 4])
    rank.write_floats(2, [1, 1, 1, 1])
    rank.define(add(1, 2), template=0, base=3)
    for i in range(8000):  # about 0.7 MB through a ring of 256 KiB
        rank.execute(add(3 + i, 2), 0, base=4 + i)
        rank.free(3 + i)
    assert rank.read_floats(8003, 4) == [8002, 8003, 8004, 8005]
    assert stats(rank)["storages"] == 3


def test_argument_types_that_cannot_be_sent_are_refused_and_the_rank_lives(rank: Producer) -> None:
    rank.write_floats(1, [1, 2, 3, 4])
    with pytest.raises(RemoteError, match="cannot be sent to a proxied device") as error:
        rank.define(Op("aten::set.source_Storage", tensor_key([4]) + words(Tag.INT, 0), [1]), base=2)
    assert error.value.status == NOT_IMPLEMENTED
    assert rank.read_floats(1, 4) == [1, 2, 3, 4]
