"""Programs of raw messages for several ranks, each run by a thread of its own, as ranks are."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.proxy_runtime.device.producer import Message, Op, Producer, Tag, none_key, real, tensor_key, words

COMM = 7
ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER = 0, 1, 2, 3


def tensors(*keys: bytes) -> bytes:
    return words(Tag.LIST | len(keys) << 8 | 1 << 40) + b"".join(keys)


def flag(value: bool) -> bytes:
    return words(Tag.BOOL | int(value) << 8)


def copy(to: int, source: int, n: int, *, offset: int = 0, source_n: int | None = None) -> Op:
    """Overwrites `n` floats of storage `to`, from `offset` on, with the first `n` of `source`."""
    whole = offset == 0 and source_n is None
    key = tensor_key([n]) if whole else tensor_key([n], strides=[1], offset=offset)
    return Op("aten::copy_", key + tensor_key([n]) + flag(False), [to, source])


def mul_(handle: int, factor: int, n: int) -> Op:
    return Op("aten::mul_.Scalar", tensor_key([n]) + words(Tag.SCALAR_INT), [handle], words(factor))


def add_(handle: int, other: int, n: int, alpha: int = 1) -> Op:
    key = tensor_key([n]) + tensor_key([n]) + words(Tag.SCALAR_INT)
    return Op("aten::add_.Tensor", key, [handle, other], words(alpha))


def sin(handle: int, n: int) -> Op:
    return Op("aten::sin", tensor_key([n]), [handle])


def zero_(handle: int, n: int) -> Op:
    return Op("aten::zero_", tensor_key([n]), [handle])


def normal_(handle: int, n: int) -> Op:
    key = tensor_key([n]) + words(Tag.FLOAT, Tag.FLOAT) + none_key()
    return Op("aten::normal_", key, [handle], real(0.0) + real(1.0))


def foreach_mul_(handles: Sequence[int], factor: int, n: int) -> Op:
    key = tensors(*[tensor_key([n])] * len(handles)) + words(Tag.SCALAR_INT)
    return Op("aten::_foreach_mul_.Scalar", key, list(handles), words(factor))


def batch_norm(handle: int, mean: int, var: int, n: int) -> Op:
    """Writes `mean` and `var` (4 floats), which its schema does not say. 3 results."""
    key = tensor_key([n // 4, 4]) + none_key() * 2 + tensor_key([4]) * 2 + flag(True) + words(Tag.FLOAT, Tag.FLOAT)
    return Op("aten::native_batch_norm", key, [handle, mean, var], real(0.1) + real(1e-5))


@dataclass
class Rank:
    """Keeps a rank's templates and the handles of its results."""

    producer: Producer
    templates: dict[tuple[str, bytes], int] = field(default_factory=dict)
    next_handle: int = 1000

    def run(self, op: Op, results: int = 0) -> int:
        """Defines the operator at its first use, and only sends it later. Returns the handle of the first result."""
        base = self.next_handle
        self.next_handle += results
        key = (op.name, op.key)
        if key in self.templates:
            self.producer.execute(op, self.templates[key], base)
        else:
            self.templates[key] = len(self.templates)
            self.producer.define(op, self.templates[key], base)
        return base

    def all_reduce(self, handle: int, n: int, *, offset: int | None = None) -> None:
        key = tensor_key([n]) if offset is None else tensor_key([n], strides=[1], offset=offset)
        self.producer.collective(COMM, ALL_REDUCE, [(key, handle)], [(key, handle)])

    def broadcast(self, handle: int, n: int, root: int = 0) -> None:
        self.producer.collective(COMM, BROADCAST, [], [(tensor_key([n]), handle)], root=root)

    def write(self, handle: int, values: Sequence[float], offset: int = 0) -> None:
        self.producer.write(handle, struct.pack(f"={len(values)}f", *values), offset=4 * offset)

    def seed(self, seed: int) -> None:
        self.producer.send(Message.SEED, words(0, seed))


def together(producers: Sequence[Producer], program: Callable[[Rank, int], object]) -> list[object]:
    """Runs `program(rank, index)` for every rank at once; what each returned."""
    results: list[object] = [None] * len(producers)
    errors: list[BaseException] = []

    def one(index: int) -> None:
        try:
            rank = Rank(producers[index])
            producers[index].communicator(COMM, index, range(len(producers)))
            results[index] = program(rank, index)
        except BaseException as error:  # for the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(producers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
