"""A rank made of Python: writes raw messages into a ring and reads the answers. Test subject, not product."""

from __future__ import annotations

import ctypes
import mmap
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from proxy_runtime.channel.ring import HEADER_BYTES, Ring

HEAD, TAIL, CONSUMER_SLEEPING = 64, 128, 192
RESPONSE_SEQ, RESPONSE_LENGTH, RESPONSE_STATUS = 320, 328, 336
ERROR_FLAG, STEP = 384, 2560
NO_TEMPLATE = 2**64 - 1


class Message(IntEnum):
    PAD = 0
    ALLOC = 1
    FREE = 2
    RESIZE = 3
    WRITE = 4
    READ = 5
    DEFINE = 6
    EXEC = 7
    SYNC = 8
    SEED = 9
    NEW_GENERATOR = 10
    GET_RNG = 11
    SET_RNG = 12
    STORE = 13
    COMMUNICATOR = 14
    COLLECTIVE = 15
    STEP = 16
    STATS = 17
    EXIT = 18
    FLAGS = 19
    READY = 20
    DEVICE_INFO = 21
    MARK = 22
    UNMARK = 23
    ELAPSED = 24
    PULL = 25
    FREE_GENERATOR = 26
    PULL_PINNED = 27
    PUSH_PINNED = 28
    LIBRARY = 30
    LIBRARY_PART = 31
    RESET = 32


class Tag(IntEnum):
    NONE = 1
    UNDEFINED = 2
    TENSOR = 3
    CPU_TENSOR = 4
    INT = 5
    BOOL = 6
    FLOAT = 7
    SCALAR_INT = 8
    SCALAR_BOOL = 9
    STRING = 10
    DEVICE = 11
    INT_LIST = 12
    BOOL_LIST = 13
    FLOAT_LIST = 14
    LIST = 15
    GENERATOR = 16
    COMPLEX = 17
    FLOAT_KEY = 18
    LAYOUT = 19
    DTYPE = 20
    MEMORY_FORMAT = 21
    COMPOSED = 22
    SAME_TENSOR = 23


FLOAT32, INT64 = 6, 4  # ScalarType
GLOBALS = FLOAT32  # default dtype float32, nothing deterministic


class RemoteError(Exception):
    """The proxy answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def header_check(length: int, kind: int) -> int:
    x = ((length ^ (kind << 16)) * 0x9E3779B1) & 0xFFFFFFFF
    return ((x >> 16) ^ x ^ 0x5A5A) & 0xFFFF


def padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 8)


def words(*values: int) -> bytes:
    return b"".join(struct.pack("=Q", value & (2**64 - 1)) for value in values)


def real(value: float) -> bytes:
    return struct.pack("=d", value)


def tensor_key(
    sizes: Sequence[int], *, dtype: int = FLOAT32, strides: Sequence[int] | None = None, offset: int = 0
) -> bytes:
    canonical = strides is None
    head = Tag.TENSOR | dtype << 8 | len(sizes) << 16 | int(canonical) << 24
    return words(head, *sizes) + (b"" if strides is None else words(*strides, offset))


def none_key() -> bytes:
    return words(Tag.NONE)


@dataclass
class Op:
    """One operator call: key (without globals), handles and payload."""

    name: str
    key: bytes
    handles: list[int] = field(default_factory=list)
    payload: bytes = b""

    def define_body(self, template: int, base: int, globals_word: int = GLOBALS) -> bytes:
        name = self.name.encode()
        key = words(globals_word) + self.key
        head = words(template, base, len(name), len(key) // 8, len(self.handles), len(self.payload) // 8)
        return head + padded(name) + key + words(*self.handles) + self.payload

    def exec_body(self, template: int, base: int) -> bytes:
        head = words(template, base, len(self.handles), len(self.payload) // 8)
        return head + words(*self.handles) + self.payload


class Producer:
    """Writes to a ring as a rank does, with a deadline on every wait."""

    def __init__(self, ring: Ring, deadline_s: float = 20.0) -> None:
        self.ring = ring
        self.deadline_s = deadline_s
        size = HEADER_BYTES + ring.fields.ring_bytes + ring.fields.response_bytes
        self._map = mmap.mmap(ring.fd, size)
        self._words = memoryview(self._map).cast("Q")  # whole words: struct writes byte by byte
        self.head = ring.head
        self._libc = ctypes.CDLL(None)

    def close(self) -> None:
        self._words.release()
        self._map.close()

    def pinned(self, size: int) -> memoryview:
        """The memory behind the response area; the caller releases it."""
        start = HEADER_BYTES + self.ring.fields.ring_bytes + self.ring.fields.response_bytes
        return memoryview(mmap.mmap(self.ring.fd, start + size))[start:]

    # --- raw -----------------------------------------------------------------------------------

    def put(self, raw: bytes) -> None:
        """Publishes bytes as they are: how malformed messages are made."""
        assert len(raw) % 8 == 0
        at = self.head % self.ring.fields.ring_bytes
        room = self.ring.fields.ring_bytes - at
        if len(raw) > room:
            self._wait(lambda: self.head + room - self.ring.tail <= self.ring.fields.ring_bytes)
            self._raw(at, self._message(Message.PAD, b"\0" * (room - 8)))
            self._advance(room)
            at = 0
        self._wait(lambda: self.head + len(raw) - self.ring.tail <= self.ring.fields.ring_bytes)
        self._raw(at, raw)
        self._advance(len(raw))

    def send(self, kind: Message, body: bytes = b"") -> None:
        self.put(self._message(kind, body))

    def call(self, kind: Message, body: bytes = b"") -> bytes:
        seq = self.ring.response_seq
        self.send(kind, body)
        return self.answer(seq)

    def answer(self, after: int) -> bytes:
        self._wait(lambda: self.ring.response_seq > after or self.ring.proxy_gone)
        if self.ring.response_seq <= after:
            raise RemoteError(1, f"proxy gone: {self.ring.error}")
        length, status = struct.unpack_from("=QI", self._map, RESPONSE_LENGTH)
        start = HEADER_BYTES + self.ring.fields.ring_bytes
        data = bytes(self._map[start : start + length])
        if status != 0:
            raise RemoteError(status, data.decode(errors="replace"))
        return data

    def take_error(self) -> str | None:
        error = self.ring.error
        struct.pack_into("=I", self._map, ERROR_FLAG, 0)
        return error

    # --- what ranks say ------------------------------------------------------------------------

    def alloc(self, handle: int, n_bytes: int) -> None:
        self.send(Message.ALLOC, words(handle, n_bytes))

    def free(self, handle: int) -> None:
        self.send(Message.FREE, words(handle))

    def resize(self, handle: int, n_bytes: int) -> None:
        self.send(Message.RESIZE, words(handle, n_bytes))

    def write(self, handle: int, data: bytes, offset: int = 0) -> None:
        self.send(Message.WRITE, words(handle, offset, len(data)) + padded(data))

    def read(self, handle: int, n_bytes: int, offset: int = 0) -> bytes:
        return self.call(Message.READ, words(handle, offset, n_bytes))

    def write_floats(self, handle: int, values: Sequence[float]) -> None:
        self.alloc(handle, 4 * len(values))
        self.write(handle, struct.pack(f"={len(values)}f", *values))

    def read_floats(self, handle: int, n: int) -> list[float]:
        return list(struct.unpack(f"={n}f", self.read(handle, 4 * n)))

    def define(self, op: Op, template: int = NO_TEMPLATE, base: int = 0) -> list[int]:
        data = self.call(Message.DEFINE, op.define_body(template, base))
        return list(struct.unpack(f"={len(data) // 8}Q", data))

    def execute(self, op: Op, template: int, base: int = 0) -> None:
        self.send(Message.EXEC, op.exec_body(template, base))

    def sync(self) -> None:
        self.call(Message.SYNC)

    def step(self, n: int) -> None:
        self._words[STEP // 8] = n
        self.send(Message.STEP, words(n))

    def communicator(self, comm: int, own: int, members: Sequence[int]) -> None:
        self.send(Message.COMMUNICATOR, words(comm, own, len(members), *members))

    def collective(
        self,
        comm: int,
        kind: int,
        inputs: Sequence[tuple[bytes, int]] = (),
        outputs: Sequence[tuple[bytes, int]] = (),
        *,
        op: int = 0,
        root: int = 0,
        extra: Sequence[int] = (),
    ) -> None:
        body = words(comm, kind, op, root, len(inputs), len(outputs), len(extra))
        for key, handle in [*inputs, *outputs]:
            body += key + words(handle)
        self.send(Message.COLLECTIVE, body + words(*extra))

    def store(self, op: int, key: bytes, value: bytes = b"", number: int = 0) -> bytes:
        request = (
            struct.pack("=BI", op, len(key)) + key + struct.pack("=I", len(value)) + value + struct.pack("=q", number)
        )
        return self.call(Message.STORE, words(len(request)) + padded(request))

    # --- inside --------------------------------------------------------------------------------

    @staticmethod
    def _message(kind: int, body: bytes) -> bytes:
        length = 8 + len(body)
        return struct.pack("=IHH", length, kind, header_check(length, kind)) + body

    def _raw(self, at: int, data: bytes) -> None:
        start = HEADER_BYTES + at
        self._map[start : start + len(data)] = data

    def _advance(self, n: int) -> None:
        self.head += n
        self._words[HEAD // 8] = self.head
        word = ctypes.c_uint32.from_buffer(self._map, CONSUMER_SLEEPING)
        if word.value:
            word.value = 0
            self._libc.syscall(202, ctypes.byref(word), 1, 1, None, None, 0)
        del word

    def _wait(self, ready) -> None:
        until = time.monotonic() + self.deadline_s
        while not ready():
            if time.monotonic() > until:
                raise TimeoutError(f"the proxy did not answer; error: {self.ring.error}")
            time.sleep(0.0002)
