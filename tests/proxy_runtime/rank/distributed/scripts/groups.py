"""Groups of some ranks, backend names, stores, and process groups that come and go."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from same import BACKEND, DEVICE, KIND, ON_DEVICE, RANK, WORLD, begin, case, digest, values
from torch.distributed.device_mesh import init_device_mesh

SCRATCH, PORT = Path(sys.argv[1]), int(sys.argv[2])
begin(timeout=datetime.timedelta(seconds=60))


def summed(group: dist.ProcessGroup | None, device: object = None) -> str:
    tensor = values(6, device=device)
    dist.all_reduce(tensor, group=group)
    return digest(tensor)


@case
def some_ranks() -> object:
    group = dist.new_group([0, 1])
    return summed(group) if RANK < 2 else None


@case
def another_order() -> object:
    group = dist.new_group([1, 0])
    if RANK >= 2:
        return None
    tensor, parts = values(6), [torch.empty(1, device=DEVICE) for _ in range(2)]
    dist.broadcast(tensor, 1, group=group)
    dist.all_gather(parts, torch.full((1,), float(RANK), device=DEVICE), group=group)
    order = dist.get_group_rank(group, RANK), dist.get_process_group_ranks(group)
    return digest(tensor, *parts), order


@case
def partitions() -> object:
    halves = [[rank for rank in range(WORLD) if rank % 2 == half] for half in range(2)]
    first, _ = dist.new_subgroups(group_size=1 if WORLD < 4 else 2)
    second, _ = dist.new_subgroups_by_enumeration(halves)
    return summed(first), summed(second)


@case
def split() -> object:
    """gloo splits too, but names its parts by ports that the native run cannot choose: only ours is run."""
    halves = [[rank for rank in range(WORLD) if rank % 2 == half] for half in range(2)]
    group = dist.split_group(dist.group.WORLD, halves) if ON_DEVICE else dist.new_subgroups_by_enumeration(halves)[0]
    return summed(group)


@case
def named_arguments() -> object:
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=5), group_desc="pair", backend=BACKEND)
    if RANK >= 2:
        return None
    tensor = values(4)
    dist.broadcast(tensor, group=group, group_src=1)
    dist.destroy_process_group(group)
    return digest(tensor)


@case
def backends() -> object:
    host = dist.new_group(backend="gloo")
    mixed = dist.new_group(backend="cpu:gloo,cuda:nccl" if ON_DEVICE else "gloo")
    sums = summed(host, "cpu"), summed(host), summed(mixed, "cpu"), summed(mixed)
    return dist.get_backend(host), sums


@case
def stores() -> object:
    tcp = dist.TCPStore("127.0.0.1", PORT, WORLD, RANK == 0)
    tcp.set(f"rank{RANK}", str(RANK))
    tcp.wait([f"rank{rank}" for rank in range(WORLD)])
    prefixed = dist.PrefixStore("p", tcp)
    prefixed.set("a", "b")
    local, file = dist.HashStore(), dist.FileStore(str(SCRATCH / "store"), WORLD)
    local.set("a", "1")
    file.set(f"rank{RANK}", "x")
    found = [tcp.get(f"rank{rank}") for rank in range(WORLD)], tcp.get("p/a"), local.get("a")
    filed = [file.get(f"rank{rank}") for rank in range(WORLD)]
    absent = tcp.check(["nobody"])
    dist.barrier()  # natively the store ends with rank 0's handle
    return found, filed, absent


@case
def store_timeout() -> object:
    store = dist.TCPStore("127.0.0.1", PORT + 1, WORLD, RANK == 0)
    try:
        store.wait(["never"], datetime.timedelta(milliseconds=200))
    except dist.DistStoreError as error:
        return type(error).__name__
    return None


@case
def detailed_debugging() -> str:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    made = summed(dist.new_group())
    dist.set_debug_level(dist.DebugLevel.OFF)
    return made


@case
def without_the_others() -> object:
    """The last: natively, among four ranks, groups that are made after such a one wait for one another for ever."""
    return summed(dist.new_group([0, 1], use_local_synchronization=True)) if RANK < 2 else None


dist.barrier()
dist.destroy_process_group()
RENDEZVOUS = {
    "by_environment": {"init_method": "env://"},
    "by_file": {"init_method": f"file://{SCRATCH / 'meeting'}", "rank": RANK, "world_size": WORLD},
    "by_address": {"init_method": f"tcp://127.0.0.1:{PORT + 2}", "rank": RANK, "world_size": WORLD},
}
for name, arguments in RENDEZVOUS.items():

    def again(arguments: dict = arguments) -> str:
        begin(**arguments)
        made = summed(None)
        dist.barrier()
        dist.destroy_process_group()
        return made

    again.__name__ = name
    case(again)


@case
def by_store() -> str:
    begin(store=dist.TCPStore("127.0.0.1", PORT + 3, WORLD, RANK == 0), rank=RANK, world_size=WORLD)
    made = summed(None)
    dist.barrier()
    dist.destroy_process_group()
    return made


@case
def by_a_mesh() -> str:
    made = summed(init_device_mesh(KIND, (WORLD,)).get_group())
    dist.barrier()
    dist.destroy_process_group()
    return made


print("end")
