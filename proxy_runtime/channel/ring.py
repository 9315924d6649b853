"""Rings from the outside: creating one, reading its header words, finding the one of a running process.

The layout is `ring.hpp`'s; a test compares the offsets. Nothing here produces or consumes messages, but for the last
one of a rank that has ended before its job was restored.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from proxy_runtime.errors import ErgoError

MAGIC: Final = 0x4552474F52494E47
PROTOCOL_VERSION: Final = 1
HEADER_BYTES: Final = 8192
DEFAULT_RING_BYTES: Final = 4 << 20
DEFAULT_RESPONSE_BYTES: Final = 1 << 20
DEFAULT_PINNED_BYTES: Final = 16 << 30  # addresses: memory is taken by what uses it
MEMFD_NAME: Final = "ergo-ring"

_FIXED: Final = struct.Struct("=QIIQQQ")  # magic, version, rank, ring_bytes, response_bytes, build
_HEAD, _TAIL = 64, 128
_CONSUMER_SLEEPING, _PRODUCER_SLEEPING = 192, 256
_RESPONSE_SEQ = 320
_ERROR_FLAG, _ERROR_MESSAGE, _ERROR_BYTES = 384, 392, 2048
_PROXY_GONE, _RANK_ATTACHED, _RANK_LEAVING = 2496, 2500, 2504
_STEP, _STEP_DONE, _PINNED_BYTES = 2560, 2568, 2576
_SHARED, _CLAIMANT = 4096, 4100  # shared_ring.hpp

_EXIT, _EXIT_BYTES = 18, 8  # Message::Exit: a header without a body

_PAGE: Final = 4096  # x86-64
_FUTEX_WAKE: Final = 1
_SYS_FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine, 202)


def build_word(build_id: str) -> int:
    """The first 8 bytes of a build id as the ring's header and the device proxy hold them; 0 for none."""
    return int.from_bytes(bytes.fromhex(build_id[:16]), "little") if build_id else 0


class RingError(ErgoError):
    """A ring that cannot be created, opened or understood."""

    code = "ring"


@dataclass(frozen=True, slots=True)
class RingFields:
    """The fields of a ring's header that never change."""

    rank: int
    ring_bytes: int
    response_bytes: int
    build: int


class Ring:
    """A mapping of one ring's header, for whoever launches, watches or ends a rank.

    Attributes:
        fd: descriptor of the memfd; given to the rank at its start and to the proxy by `attach`.
        fields: rank, sizes in bytes and build word.
    """

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over.

        Raises:
            RingError: `ring.invalid` if there is no ring behind it.
        """
        self.fd = fd
        try:
            size = os.fstat(fd).st_size
            if size < HEADER_BYTES:
                raise RingError(f"The channel has {size} bytes, too few for a ring.", code="ring.invalid")
            self._map = mmap.mmap(fd, HEADER_BYTES)
        except OSError as error:
            raise RingError(f"The channel cannot be mapped: {error}.", code="ring.invalid") from error
        magic, version, rank, ring_bytes, response_bytes, build = _FIXED.unpack_from(self._map, 0)
        if magic != MAGIC or version != PROTOCOL_VERSION or HEADER_BYTES + ring_bytes + response_bytes > size:
            self._map.close()
            raise RingError(
                f"The channel is no ring of protocol version {PROTOCOL_VERSION}.",
                code="ring.invalid",
                remedy="Continue this job with the build of the runtime that started it.",
            )
        self.fields = RingFields(rank, ring_bytes, response_bytes, build)
        # Views of whole words, read and written in one access: struct goes byte by byte and would tear them.
        self._words32 = memoryview(self._map).cast("I")
        self._words64 = memoryview(self._map).cast("Q")

    @classmethod
    def create(
        cls,
        rank: int,
        build_id: str = "",
        *,
        ring_bytes: int = DEFAULT_RING_BYTES,
        response_bytes: int = DEFAULT_RESPONSE_BYTES,
        pinned_bytes: int = DEFAULT_PINNED_BYTES,
        shared: bool = False,
    ) -> Ring:
        """Creates an empty ring.

        Args:
            rank: global rank that will produce into it.
            build_id: id of the runtime's build, hexadecimal; empty matches any.
            ring_bytes: size of the message area, a power of two.
            response_bytes: size of the answer area, which bounds the chunks of device-to-host copies.
            pinned_bytes: most that the rank can have as pinned memory which its proxy reaches too; more is memory of
                its own. Not for shared rings, whose next process must not meet what is left of the one before it.
            shared: the processes of a tree use it one after another, each claiming it first.
        """
        if shared:
            pinned_bytes = 0
        if ring_bytes < 4096 or ring_bytes & (ring_bytes - 1) or response_bytes < 4096:
            raise ValueError("ring_bytes must be a power of two and both sizes at least 4096 bytes")
        if pinned_bytes and (pinned_bytes % _PAGE or (ring_bytes + response_bytes) % _PAGE):
            raise ValueError("pinned memory begins and ends with a page")
        fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, HEADER_BYTES + ring_bytes + response_bytes + pinned_bytes)
            fixed = _FIXED.pack(MAGIC, PROTOCOL_VERSION, rank, ring_bytes, response_bytes, build_word(build_id))
            os.pwrite(fd, fixed, 0)
            os.pwrite(fd, struct.pack("=I", shared), _SHARED)
            os.pwrite(fd, struct.pack("=Q", pinned_bytes), _PINNED_BYTES)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def of_ended(cls, rank: int, step: int, unread: bytes = b"", build_id: str = "") -> Ring:
        """Creates the ring of a rank that has let go of its own: it has ended, or is about to.

        A proxy that loads the rank's state, which others may still need (contributions on their way, the rendezvous
        store), executes what is left in it and then takes the rank for ended.

        Args:
            rank: global rank.
            step: the last step that the proxy has executed.
            unread: of the ring that it had.
            build_id: as for `create`.
        """
        ring = cls.create(rank, build_id, pinned_bytes=0)
        exit_message = struct.pack("=IHH", _EXIT_BYTES, _EXIT, _header_check(_EXIT_BYTES, _EXIT))
        messages = (unread + exit_message)[: ring.fields.ring_bytes]  # a full ring ends with a rank's own last message
        os.pwrite(ring.fd, messages, HEADER_BYTES)
        ring._words64[_STEP // 8] = ring._words64[_STEP_DONE // 8] = step
        ring._words64[_HEAD // 8] = len(messages)
        return ring

    def unread(self) -> bytes:
        """Messages that the proxy has not executed, in order; both sides must stand still."""
        size = self.fields.ring_bytes
        start, length = self.tail % size, self.head - self.tail
        first = os.pread(self.fd, min(length, size - start), HEADER_BYTES + start)
        return first + os.pread(self.fd, length - len(first), HEADER_BYTES)

    @classmethod
    def of_process(cls, pid: int) -> Ring:
        """Opens the ring that a process has mapped, through `/proc/PID/map_files`.

        Needs CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN. This is how a restored rank's ring is found: it
        has no name and no descriptor anywhere.

        Raises:
            RingError: `ring.missing` if the process has none or is gone.
        """
        marker = f"/memfd:{MEMFD_NAME}"
        try:
            with open(f"/proc/{pid}/maps") as maps:
                regions = [line.split(maxsplit=5) for line in maps]
            for region in regions:
                if len(region) == 6 and region[5].startswith(marker):
                    return cls(os.open(f"/proc/{pid}/map_files/{_map_file(region[0])}", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise RingError(f"The ring of process {pid} cannot be opened: {error}.", code="ring.missing") from error
        raise RingError(f"Process {pid} has no ring mapped; it is no rank.", code="ring.missing")

    @classmethod
    def shared_of(cls, keeper_pid: int) -> list[Ring]:
        """Opens the shared rings of a tree, which its keeper holds, in the order of their ranks.

        Raises:
            RingError: `ring.missing` if the process has none or is gone.
        """
        rings: list[Ring] = []
        try:
            for name in os.listdir(f"/proc/{keeper_pid}/fd"):
                path = f"/proc/{keeper_pid}/fd/{name}"
                if os.readlink(path).startswith(f"/memfd:{MEMFD_NAME}"):
                    rings.append(cls(os.open(path, os.O_RDWR | os.O_CLOEXEC)))
        except OSError as error:
            for ring in rings:
                ring.close()
            raise RingError(
                f"The rings of process {keeper_pid} cannot be opened: {error}.", code="ring.missing"
            ) from error
        if not rings:
            raise RingError(f"Process {keeper_pid} holds no rings.", code="ring.missing")
        return sorted(rings, key=lambda ring: ring.fields.rank)

    @property
    def claimant(self) -> int:
        """Of a shared ring: the process (in the tree's pid namespace) that has it, 0 for nobody."""
        return self._u32(_CLAIMANT)

    @property
    def head(self) -> int:
        """Bytes published by the rank so far."""
        return self._u64(_HEAD)

    @property
    def tail(self) -> int:
        """Bytes executed by the proxy so far."""
        return self._u64(_TAIL)

    @property
    def step(self) -> int:
        """The last step that the rank has issued."""
        return self._u64(_STEP)

    @property
    def step_done(self) -> int:
        """The last step that the proxy has executed."""
        return self._u64(_STEP_DONE)

    @property
    def rank_attached(self) -> bool:
        """The rank's interposer has mapped the ring and agreed on its version."""
        return self._u32(_RANK_ATTACHED) != 0

    @property
    def response_seq(self) -> int:
        """Answers written so far."""
        return self._u64(_RESPONSE_SEQ)

    @property
    def error(self) -> str | None:
        """The asynchronous error that waits for the rank's next synchronisation."""
        if self._u32(_ERROR_FLAG) == 0:
            return None
        raw = bytes(self._map[_ERROR_MESSAGE : _ERROR_MESSAGE + _ERROR_BYTES])
        return raw.split(b"\0", 1)[0].decode(errors="replace")

    @property
    def proxy_gone(self) -> bool:
        """The rank has been told that its proxy is gone."""
        return self._u32(_PROXY_GONE) != 0

    @property
    def rank_leaving(self) -> bool:
        """The rank's interpreter is ending, or has ended."""
        return self._u32(_RANK_LEAVING) != 0

    def mark_rank_left(self) -> None:
        """Tells the proxy that the rank's process has ended: what it has not sent will not come."""
        self._words32[_RANK_LEAVING // 4] = 2

    def mark_proxy_gone(self) -> None:
        """Tells the rank that nothing will answer any more, and wakes it: its waits raise."""
        self._words32[_PROXY_GONE // 4] = 1
        self.wake_rank()

    def wake_rank(self) -> None:
        """Has a rank that sleeps look again at what it waits for."""
        word = ctypes.c_uint32.from_buffer(self._map, _PRODUCER_SLEEPING)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(_SYS_FUTEX, ctypes.byref(word), _FUTEX_WAKE, 2**31 - 1, None, None, 0)
        del word  # releases the buffer, so that the mapping can be closed

    def close(self) -> None:
        """Unmaps the header and closes the descriptor. May be called twice."""
        if self.fd < 0:
            return
        self._words32.release()
        self._words64.release()
        self._map.close()
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _u32(self, offset: int) -> int:
        return int(self._words32[offset // 4])

    def _u64(self, offset: int) -> int:
        return int(self._words64[offset // 8])


def _header_check(length: int, kind: int) -> int:
    mixed = ((length ^ (kind << 16)) * 0x9E3779B1) & 0xFFFFFFFF
    return ((mixed >> 16) ^ mixed ^ 0x5A5A) & 0xFFFF


def _map_file(address_range: str) -> str:
    # maps pads addresses to eight digits, map_files does not.
    return "-".join(f"{int(part, 16):x}" for part in address_range.split("-"))
