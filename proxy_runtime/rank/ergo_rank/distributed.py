"""torch.distributed in a rank: our process group under torch's names, and a rendezvous without sockets."""

from __future__ import annotations

import collections
import datetime
import hashlib
import importlib
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch.distributed as dist

from ergo_rank import _interposer

__all__ = ["install"]

# torch's names. All of these backends would open sockets, to other ranks or to a GPU.
_BUILT_IN = ("nccl", "gloo")
_VARIANTS = ("ergo", "nccl2", "nccl-lazy", "nccl-legacy")

_made: collections.Counter[str] = collections.Counter()


def install() -> None:
    """Registers the backend and the rendezvous handlers, if this torch has torch.distributed."""
    if not dist.is_available():
        return
    backend = dist.distributed_c10d.Backend
    # A name that has a plugin already is not looked up among torch's own.
    for name in _BUILT_IN:
        backend._plugins[name.upper()] = backend._BackendPlugin(_make_backend(name), True)
    for name in _VARIANTS:
        backend.register_backend(name, _make_backend(name), extended_api=True, devices=["cpu", "cuda"])
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    for scheme in ("env", "tcp"):
        rendezvous._rendezvous_handlers[scheme] = _rendezvous
    from ergo_rank.store import ChannelTCPStore

    for module in (dist, rendezvous):
        module.TCPStore = ChannelTCPStore  # type: ignore[attr-defined]


def _make_backend(name: str) -> Any:
    def create(options: Any, backend_options: Any = None) -> Any:
        members = list(options.global_ranks_in_group) or list(range(options.group_size))
        communicator = _communicator(str(options.group_id), name, members)
        return _interposer.make_process_group(name, communicator, options.group_rank, members)

    return create


def _communicator(group: str, backend: str, members: list[int]) -> int:
    """An id that all members compute alike and that no other group of the job has, not even one of the same name."""
    text = f"{group}/{backend}/{','.join(map(str, members))}"
    _made[text] += 1
    digest = hashlib.blake2b(f"{text}/{_made[text]}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _rendezvous(url: str, timeout: datetime.timedelta | None = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    parts = urlparse(url)
    query = dict(parse_qsl(parts.query))
    rank = int(query.get("rank", os.environ.get("RANK", "0")))
    world_size = int(query.get("world_size", os.environ.get("WORLD_SIZE", "1")))
    from ergo_rank.store import ChannelStore, fresh_prefix

    prefix = fresh_prefix(f"{parts.scheme}://{parts.netloc}")
    yield ChannelStore(prefix) if timeout is None else ChannelStore(prefix, timeout), rank, world_size
