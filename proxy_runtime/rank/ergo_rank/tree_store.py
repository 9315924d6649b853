"""The rendezvous store of a tree that starts its own ranks: files on the tree's own /dev/shm.

All processes of the tree are in one container, so their store needs no server, no socket and no device; it travels with
the tree. It stands in for ``dist.TCPStore``: whoever would have listened on a port is the store's master here, and
the store lives as long as its master does.
"""

from __future__ import annotations

import collections
import datetime
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch.distributed as dist

from ergo_rank.slots import lives
from ergo_rank.store import DEFAULT_TIMEOUT, OPERATIONS, ChannelStore

__all__ = ["TreeStore", "TreeTCPStore", "install"]

_ROOT = "/dev/shm/ergo-rendezvous"
_PAUSE_S = 0.005

_attended: collections.Counter[int] = collections.Counter()  # by port: the last store that a rendezvous here has used
_mastered: list[int] = []  # ports whose store a rendezvous of this process has opened


def install(rendezvous: Any) -> None:
    """Puts the store behind ``env://`` and ``tcp://``, and in the place of ``dist.TCPStore``."""
    for scheme in ("env", "tcp"):
        rendezvous._rendezvous_handlers[scheme] = _rendezvous
    for module in (dist, rendezvous):
        module.TCPStore = TreeTCPStore  # type: ignore[attr-defined]
    destroy = dist.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        destroy(group)
        if not dist.is_initialized():
            while _mastered:
                _close(_mastered.pop())

    destroy_process_group.__doc__ = destroy.__doc__
    for module in (dist, dist.distributed_c10d):
        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]


class TreeStore(ChannelStore):
    """A store in a directory; every request holds its lock."""

    def __init__(self, directory: str, prefix: str = "", timeout: datetime.timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(prefix, timeout)
        self._directory = directory

    def clone(self) -> TreeStore:
        return TreeStore(self._directory, self._prefix, self._limit)

    def _request(self, op: int, key: str, value: bytes = b"", number: int = 0) -> tuple[bool, bytes]:
        with _locked(self._directory):
            return OPERATIONS[op](_Files(self._directory), (self._prefix + key).encode(), value, number)


class _Files:
    """The keys of a store, a file each."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def read(self, key: bytes) -> bytes | None:
        try:
            with open(self._path(key), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def write(self, key: bytes, value: bytes) -> None:
        with open(self._path(key), "wb") as file:
            file.write(value)

    def remove(self, key: bytes) -> bool:
        try:
            os.unlink(self._path(key))
        except FileNotFoundError:
            return False
        return True

    def count(self) -> int:
        return sum(name.startswith("key-") for name in os.listdir(self._directory))

    def _path(self, key: bytes) -> str:
        return os.path.join(self._directory, "key-" + hashlib.blake2b(key, digest_size=20).hexdigest())


class TreeTCPStore(TreeStore):
    """Stands in for ``dist.TCPStore``: the same port is the same store in all processes of the tree."""

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
        number = _open(port) if is_master else (port, _find(port, 0, timeout))
        super().__init__(_directory(*number), timeout=timeout)
        self.host, self.port = host_name, number[0]


def _rendezvous(url: str, timeout: datetime.timedelta | None = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    parts = urlparse(url)
    query = dict(parse_qsl(parts.query))

    def setting(name: str, variable: str) -> str:
        found = query.get(name, os.environ.get(variable))
        if found is None:
            raise ValueError(
                f"Error initializing torch.distributed using {parts.scheme}:// rendezvous: environment variable "
                f"{variable} expected, but not set"
            )
        return found

    rank, world_size = int(setting("rank", "RANK")), int(setting("world_size", "WORLD_SIZE"))
    port = parts.port if parts.scheme == "tcp" else int(setting("master_port", "MASTER_PORT"))
    if port is None:
        raise ValueError(f"{url} names no port.")
    limit = timeout or DEFAULT_TIMEOUT
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        # The launcher has the store; workers that it starts again, and their second groups, must not meet old keys.
        _attended[port] += 1
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"/worker/attempt_{attempt}/{_attended[port]}/"
        yield TreeStore(_directory(port, _find(port, 0, limit)), prefix, limit), rank, world_size
        return
    if rank == 0:
        number = _open(port)[1]
        _mastered.append(port)
    else:
        number = _find(port, _attended[port], limit)
    _attended[port] = number
    yield TreeStore(_directory(port, number), "", limit), rank, world_size


# ---- Which store a port means: the last one that a living process has opened there.


def _open(port: int) -> tuple[int, int]:
    """Opens a fresh store. Returns port and number."""
    while True:
        wanted = port or _free_port()
        with _locked(_ROOT):
            record = _record(wanted)
            if record["open"] and record["pid"] != os.getpid() and lives(record["pid"]):
                if port == 0:
                    continue
                raise dist.DistNetworkError(
                    f"The server socket has failed to listen on any local network address. port: {port}, "
                    f"EADDRINUSE: process {record['pid']} of this job has a store there"
                )
            number = record["number"] + 1
            os.makedirs(_directory(wanted, number))
            _write(wanted, {"number": number, "pid": os.getpid(), "open": True})
        return wanted, number


def _close(port: int) -> None:
    with _locked(_ROOT):
        record = _record(port)
        if record["pid"] == os.getpid():
            _write(port, {**record, "open": False})


def _find(port: int, beyond: int, timeout: datetime.timedelta) -> int:
    """Number of the port's store, once there is one later than `beyond`."""
    waited = 0.0
    while True:
        record = _record(port)
        if record["open"] and record["number"] > beyond and lives(record["pid"]):
            return record["number"]
        if waited >= timeout.total_seconds():
            raise dist.DistNetworkError(
                f"The client socket has timed out after {timeout.total_seconds():g} s: nobody has opened a store on "
                f"port {port} of this job."
            )
        time.sleep(_PAUSE_S)
        waited += _PAUSE_S  # not the clock's time: a job that is frozen and thawed has not been waiting


def _record(port: int) -> dict[str, Any]:
    try:
        with open(f"{_ROOT}/port-{port}") as file:
            return json.load(file)
    except FileNotFoundError:
        return {"number": 0, "pid": 0, "open": False}


def _write(port: int, record: dict[str, Any]) -> None:
    fresh = f"{_ROOT}/port-{port}.new"
    with open(fresh, "w") as file:
        json.dump(record, file)
    os.replace(fresh, f"{_ROOT}/port-{port}")


def _directory(port: int, number: int) -> str:
    return f"{_ROOT}/{port}-{number}"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    os.makedirs(directory, exist_ok=True)
    fd = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
