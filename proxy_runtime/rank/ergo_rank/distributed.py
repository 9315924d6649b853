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

import torch
import torch.distributed as dist

from ergo_rank import _interposer
from ergo_rank.boot import Tree

__all__ = ["install"]

# torch's names. All of these backends would open sockets, to other ranks or to a GPU.
_BUILT_IN = ("nccl", "gloo")
_VARIANTS = ("ergo", "nccl2", "nccl-lazy", "nccl-legacy")

# Versions that do not look their own names up among the plugins.
_OWN_NAMES_FIRST = ("2.11.", "2.12.", "2.13.")

_made: collections.Counter[str] = collections.Counter()


def install(tree: Tree | None = None) -> None:
    """Registers the backend and the rendezvous handlers, if this torch has torch.distributed."""
    if not dist.is_available():
        return
    _refuse_rpc()
    make = _make_backend if tree is None else _make_tree_backend
    backend = dist.distributed_c10d.Backend
    # A name that has a plugin already is not looked up among torch's own.
    for name in _BUILT_IN:
        backend._plugins[name.upper()] = backend._BackendPlugin(make(name), True)
    for name in _VARIANTS:
        backend.register_backend(name, make(name), extended_api=True, devices=["cpu", "cuda"])
    if torch.__version__.startswith(_OWN_NAMES_FIRST):
        _refuse_built_in(dist.distributed_c10d)
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    if tree is not None:
        from ergo_rank import tree_store

        tree_store.install(rendezvous)
        _barrier_on_own_device()
        return
    for scheme in ("env", "tcp"):
        rendezvous._rendezvous_handlers[scheme] = _rendezvous
    from ergo_rank.store import ChannelTCPStore

    for module in (dist, rendezvous):
        module.TCPStore = ChannelTCPStore  # type: ignore[attr-defined]


def _refuse_built_in(c10d: Any) -> None:
    """Where torch makes its own process groups: they would open sockets, and library calls would end the rank."""
    for name in ("ProcessGroupNCCL", "ProcessGroupGloo"):

        def refuse(self: Any, *_: Any, **__: Any) -> None:
            raise NotImplementedError(
                f"ergosphere: torch {torch.__version__} makes process groups of nccl and gloo itself, which cannot "
                'work in a rank; use torch 2.15, or init_process_group("ergo").'
            )

        setattr(c10d, name, type(name, (getattr(c10d, name),), {"__init__": refuse}))


def _barrier_on_own_device() -> None:
    """A barrier of no named device is one of the device that its process uses, as with NCCL, not of the current one."""
    from ergo_rank import slots

    barrier = dist.ProcessGroup.barrier

    def on_own_device(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        for options in (*args, *kwargs.values()):
            if not isinstance(options, dist.BarrierOptions):
                continue
            device = options.device
            if device is not None and device.type == "cuda" and device.index is None:
                slots.connect_for_group(dist.get_rank())
                options.device = torch.device("cuda", _interposer.bound_device())
        return barrier(self, *args, **kwargs)

    dist.ProcessGroup.barrier = on_own_device  # type: ignore[method-assign]


def _refuse_rpc() -> None:
    """An RPC agent opens sockets between ranks, which no cut can take along."""
    rpc = importlib.import_module("torch.distributed.rpc")
    if not rpc.is_available():
        return

    def init_rpc(name: str, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"torch.distributed.rpc.init_rpc({name!r}) is not possible on Ergosphere: it joins ranks by sockets, and a "
            "job with them could be neither checkpointed nor moved. Use torch.distributed's collectives or send/recv."
        )

    rpc.init_rpc = init_rpc  # type: ignore[attr-defined]


def _make_backend(name: str) -> Any:
    def create(options: Any, backend_options: Any = None) -> Any:
        members = list(options.global_ranks_in_group) or list(range(options.group_size))
        communicator = _communicator(str(options.group_id), name, members)
        return _interposer.make_process_group(name, communicator, options.group_rank, members)

    return create


def _make_tree_backend(name: str) -> Any:
    """Processes of a tree learn one another's channels from the group's store, before the first collective."""
    from ergo_rank import slots

    def create(options: Any, backend_options: Any = None) -> Any:
        store, rank, size, group = options.store, options.group_rank, options.group_size, str(options.group_id)
        _made[f"{group}/{name}"] += 1
        prefix = f"ergo/{name}/{_made[f'{group}/{name}']}"

        def publish(slot: int) -> None:
            if rank == 0:  # groups of the same name that processes of an earlier time have made are others
                store.set(f"{prefix}/id", os.urandom(16))
            store.set(f"{prefix}/{rank}", str(slot))

        def meet() -> tuple[int, list[int]]:
            slots.connect_for_group(dist.get_rank() if dist.is_initialized() else rank)
            members = [int(store.get(f"{prefix}/{other}")) for other in range(size)]
            nonce = bytes(store.get(f"{prefix}/id"))
            if len(set(members)) != size:
                raise RuntimeError(f"Two ranks of the group {group} say that they are the same process.")
            digest = hashlib.blake2b(nonce + repr((prefix, members)).encode(), digest_size=8).digest()
            return int.from_bytes(digest, "little"), members

        slots.when_connected(publish)
        return _interposer.make_meeting_process_group(name, rank, size, meet)

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
