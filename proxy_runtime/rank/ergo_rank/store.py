"""The rendezvous store of a job, served by the device proxy: a rank needs no socket to another rank."""

from __future__ import annotations

import collections
import datetime
import struct
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ergo_rank import _interposer

__all__ = ["DEFAULT_TIMEOUT", "OPERATIONS", "ChannelStore", "ChannelTCPStore", "fresh_prefix"]

# Operations, in the order of StoreOp (channel/wire.hpp), and kStoreAwait (device/native/store_service.hpp).
_SET, _GET, _ADD, _CHECK, _COMPARE_SET, _DELETE, _NUM_KEYS, _APPEND, _AWAIT = range(9)
# A key that is set at all is usually set by then; after it the store is told that this rank does nothing but wait.
_PATIENCE_S = 1.0

_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.01
DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)


_living: list[ChannelStore] = []
_meetings: collections.Counter[str] = collections.Counter()


def fresh_prefix(address: str) -> str:
    """A prefix for one more rendezvous at `address`.

    Ranks meet at an address equally often, so they get the same one; keys of an earlier rendezvous are not found.
    """
    _meetings[address] += 1
    return f"{address}/{_meetings[address]}/"


class ChannelStore(Store):
    """A store whose requests are messages on the rank's channel.

    No request blocks in the proxy; waiting is polling here, against a clock that stands still while the rank does.

    Args:
        prefix: put before every key, so that several rendezvous of one job do not meet.
        timeout: how long `wait` and `get` wait by default.
    """

    def __init__(self, prefix: str = "", timeout: datetime.timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__()
        self._prefix = prefix
        self._limit = timeout
        # torch's wrappers hold only the native half of a store, which calls back into this one.
        _living.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._request(_SET, key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Raises dist.DistStoreError if the key does not appear in time."""
        self.wait([key])
        found, value = self._request(_GET, key)
        if not found:
            raise dist.DistStoreError(f"The key {key!r} has gone while it was read.")
        return value

    def add(self, key: str, amount: int) -> int:
        return _number(self._request(_ADD, key, number=amount)[1])

    def check(self, keys: Sequence[str]) -> bool:
        return all(_number(self._request(_CHECK, key)[1]) != 0 for key in keys)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Raises dist.DistStoreError if a key does not appear in time, or if nobody is left to set it."""
        limit = (self._limit if timeout is None else timeout).total_seconds()
        waited, pause, missing = 0.0, _FIRST_PAUSE_S, list(keys)
        while missing := [key for key in missing if not self.check([key])]:
            if waited >= _PATIENCE_S:
                self._require_somebody(missing[0])
            if waited >= limit:
                raise dist.DistStoreError(f"Waited {limit:g} s for {', '.join(missing)}: not all ranks have come.")
            # Time counts while the rank runs: one that is frozen, moved and thawed has not been waiting.
            before = time.monotonic()
            time.sleep(pause)
            waited += min(time.monotonic() - before, 10 * pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _require_somebody(self, key: str) -> None:
        reply = self._request(_AWAIT, key)[1]
        if _number(reply) == 2:
            raise dist.DistStoreError(reply[8:].decode(errors="replace") + ".")

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old, new = _bytes(expected), _bytes(desired)
        found, value = self._request(_COMPARE_SET, key, struct.pack("<I", len(old)) + old + new)
        return value if found else old

    def append(self, key: str, value: str | bytes) -> None:
        self._request(_APPEND, key, _bytes(value))

    def delete_key(self, key: str) -> bool:
        return _number(self._request(_DELETE, key)[1]) != 0

    def num_keys(self) -> int:
        return _number(self._request(_NUM_KEYS, "")[1])

    # The names under which torch's native wrappers (PrefixStore) look for them.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._limit = timeout

    @property
    def timeout(self) -> datetime.timedelta:
        return self._limit

    def clone(self) -> ChannelStore:
        return ChannelStore(self._prefix, self._limit)

    def _request(self, op: int, key: str, value: bytes = b"", number: int = 0) -> tuple[bool, bytes]:
        name = (self._prefix + key).encode()
        head = struct.pack("<BI", op, len(name))
        reply = _interposer.store_request(
            head + name + struct.pack("<I", len(value)) + value + struct.pack("<q", number)
        )
        return reply[:1] == b"\x01", reply[1:]


class ChannelTCPStore(ChannelStore):
    """Stands in for ``dist.TCPStore``: the same address is the same store in all ranks of the job."""

    def __init__(
        self,
        host_name: str,
        port: int = 0,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: datetime.timedelta = DEFAULT_TIMEOUT,
        *args: object,
        **kwargs: object,
    ) -> None:
        super().__init__(fresh_prefix(f"tcp://{host_name}:{port}"), timeout)
        self.host, self.port = host_name, port


class Keys(Protocol):
    """Where a store that is in this process keeps its keys."""

    def read(self, key: bytes) -> bytes | None: ...
    def write(self, key: bytes, value: bytes) -> None: ...
    def remove(self, key: bytes) -> bool: ...
    def count(self) -> int: ...


def _local_add(keys: Keys, key: bytes, value: bytes, number: int) -> tuple[bool, bytes]:
    total = int(keys.read(key) or b"0") + number
    keys.write(key, str(total).encode())
    return True, _packed(total)


def _local_compare_set(keys: Keys, key: bytes, value: bytes, number: int) -> tuple[bool, bytes]:
    (length,) = struct.unpack_from("<I", value)
    expected, desired = value[4 : 4 + length], value[4 + length :]
    now = keys.read(key)
    if now is None and expected:
        return True, expected
    if now is None or now == expected:
        keys.write(key, desired)
        return True, desired
    return True, now


def _local_set(keys: Keys, key: bytes, value: bytes, number: int) -> tuple[bool, bytes]:
    keys.write(key, value)
    return True, b""


def _local_get(keys: Keys, key: bytes, value: bytes, number: int) -> tuple[bool, bytes]:
    now = keys.read(key)
    return now is not None, now or b""


def _local_append(keys: Keys, key: bytes, value: bytes, number: int) -> tuple[bool, bytes]:
    keys.write(key, (keys.read(key) or b"") + value)
    return True, b""


# The same requests as device/native/store.cpp answers, for a store that needs no proxy.
OPERATIONS: dict[int, Callable[[Keys, bytes, bytes, int], tuple[bool, bytes]]] = {
    _SET: _local_set,
    _GET: _local_get,
    _ADD: _local_add,
    _CHECK: lambda keys, key, value, number: (True, _packed(keys.read(key) is not None)),
    _AWAIT: lambda keys, key, value, number: (True, _packed(keys.read(key) is not None)),
    _COMPARE_SET: _local_compare_set,
    _DELETE: lambda keys, key, value, number: (True, _packed(keys.remove(key))),
    _NUM_KEYS: lambda keys, key, value, number: (True, _packed(keys.count())),
    _APPEND: _local_append,
}


def _packed(number: int) -> bytes:
    return struct.pack("<q", number)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _number(reply: bytes) -> int:
    return struct.unpack("<q", reply[:8])[0] if len(reply) >= 8 else 0
