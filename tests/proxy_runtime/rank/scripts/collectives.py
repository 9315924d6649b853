"""Every collective of torch.distributed, on device and host tensors, under torch's own backend names."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda")


def check(name: str, got: torch.Tensor, wanted: list[float]) -> None:
    assert got.flatten().tolist() == wanted, (rank, name, got.tolist(), wanted)


def all_collectives(device: torch.device, group=None) -> None:
    mine = torch.full((2,), float(rank + 1), device=device)
    total = sum(range(1, world + 1))
    t = mine.clone()
    dist.all_reduce(t, group=group)
    check("all_reduce", t, [total] * 2)
    t = mine.clone()
    dist.all_reduce(t, op=dist.ReduceOp.MAX, group=group)
    check("max", t, [world] * 2)
    t = mine.clone()
    dist.broadcast(t, world - 1, group=group)
    check("broadcast", t, [world] * 2)
    t = mine.clone()
    dist.reduce(t, 0, group=group)
    check("reduce", t, [total] * 2 if rank == 0 else [rank + 1] * 2)
    parts = [torch.empty(2, device=device) for _ in range(world)]
    dist.all_gather(parts, mine, group=group)
    check("all_gather", torch.cat(parts), [r + 1 for r in range(world) for _ in range(2)])
    whole = torch.empty(2 * world, device=device)
    dist.all_gather_into_tensor(whole, mine, group=group)
    check("all_gather_into_tensor", whole, [r + 1 for r in range(world) for _ in range(2)])
    out = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(out, torch.arange(2.0 * world, device=device) * (rank + 1), group=group)
    check("reduce_scatter_tensor", out, [total * (2 * rank), total * (2 * rank + 1)])
    out = torch.empty(2, device=device)
    dist.reduce_scatter(out, [mine + r for r in range(world)], group=group)
    check("reduce_scatter", out, [total + world * rank] * 2)
    parts = [torch.empty(2, device=device) for _ in range(world)] if rank == 0 else None
    dist.gather(mine, parts, 0, group=group)
    if rank == 0:
        check("gather", torch.cat(parts), [r + 1 for r in range(world) for _ in range(2)])
    out = torch.empty(2, device=device)
    parts = [torch.full((2,), 10.0 + r, device=device) for r in range(world)] if rank == 0 else None
    dist.scatter(out, parts, 0, group=group)
    check("scatter", out, [10 + rank] * 2)
    out = torch.empty(world, device=device)
    dist.all_to_all_single(out, torch.arange(float(world), device=device) + 10 * rank, group=group)
    check("all_to_all_single", out, [10 * r + rank for r in range(world)])
    parts = [torch.empty(1, device=device) for _ in range(world)]
    dist.all_to_all(parts, [torch.full((1,), 10.0 * rank + r, device=device) for r in range(world)], group=group)
    check("all_to_all", torch.cat(parts), [10 * r + rank for r in range(world)])
    if world > 1:
        got = torch.empty(2, device=device)
        following, preceding = (rank + 1) % world, (rank - 1) % world
        pair = [dist.P2POp(dist.isend, mine, following, group), dist.P2POp(dist.irecv, got, preceding, group)]
        works = dist.batch_isend_irecv(pair)
        for work in works:
            work.wait()
        check("send and receive", got, [preceding + 1] * 2)
    dist.barrier(group=group)


dist.init_process_group("nccl")
assert dist.get_backend() == "nccl" and dist.get_world_size() == world
all_collectives(device)
objects: list[object] = [None] * world
dist.all_gather_object(objects, {"rank": rank})
assert [o["rank"] for o in objects] == list(range(world))
sub = dist.new_group(list(range(world)))
all_collectives(device, sub)
host = dist.new_group(backend="gloo")
all_collectives(torch.device("cpu"), host)
mixed = dist.new_group(backend="cpu:gloo,cuda:nccl")
all_collectives(torch.device("cpu"), mixed)
all_collectives(device, mixed)

torch.manual_seed(rank)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2).cuda(), device_ids=[0])
loss = model(torch.full((3, 4), float(rank), device=device)).pow(2).sum()
loss.backward()
grads = [torch.empty_like(model.module.weight) for _ in range(world)]
dist.all_gather(grads, model.module.weight.grad)
assert all(torch.equal(g, grads[0]) for g in grads)

store = dist.distributed_c10d._get_default_store()
store.set(f"key{rank}", "value")
store.wait([f"key{r}" for r in range(world)])
assert store.get("key0") == b"value" and store.add("count", 1) >= 1
assert store.compare_set("key0", "other", "new") == b"value"

links = []
for n in os.listdir("/proc/self/fd"):
    try:
        links.append(os.readlink(f"/proc/self/fd/{n}"))
    except OSError:  # of the listing itself
        continue
assert not [link for link in links if link.startswith("socket:") or "memfd" in link], links
dist.destroy_process_group()
dist.init_process_group("cpu:gloo,cuda:nccl", init_method="tcp://127.0.0.1:1234", rank=rank, world_size=world)
all_collectives(device)
dist.destroy_process_group()
print("ok")
