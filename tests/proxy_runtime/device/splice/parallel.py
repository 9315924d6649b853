"""Fully sharded, tensor-parallel and pipeline training: ranks that share little. It imports nothing of ours."""

import hashlib
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mode = sys.argv[1]
steps = int(sys.argv[2]) if sys.argv[2:] else 6
hurry = pathlib.Path(sys.argv[3]) if sys.argv[3:] else None  # half a second a step until this file is there
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).cuda()
stage: nn.Module = model
if mode == "fsdp":
    mesh = init_device_mesh("cuda", (world,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
elif mode == "hsdp":
    mesh = init_device_mesh("cuda", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
elif mode == "tp":
    mesh = init_device_mesh("cuda", (world,))
    stage = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
elif mode == "pp":
    stage = model[2:] if rank % 2 else model[:2]  # of two ranks each
optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2, foreach=mode != "tp")
data = torch.Generator().manual_seed(0 if mode in ("tp", "pp") else rank)
losses = []
for _ in range(steps):
    x, y = torch.randn(8, 32, generator=data).cuda(), torch.randint(0, 8, (8,), generator=data).cuda()
    if mode == "pp" and rank % 2 == 0:
        hidden = stage(x)
        dist.send(hidden.detach(), rank + 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, rank + 1)
        hidden.backward(gradient)
    elif mode == "pp":
        hidden = torch.empty(8, 64, device="cuda")
        dist.recv(hidden, rank - 1)
        hidden.requires_grad_()
        loss = nn.functional.cross_entropy(stage(hidden), y)
        loss.backward()
        assert hidden.grad is not None
        dist.send(hidden.grad, rank - 1)
        losses.append(loss.detach())
    else:
        loss = nn.functional.cross_entropy(stage(x), y)
        loss.backward()
        losses.append(loss.detach())
    if mode in ("fsdp", "hsdp"):  # not of tensors of two kinds
        nn.utils.clip_grad_norm_(stage.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if hurry is not None and not hurry.exists():
        time.sleep(0.5)


def digest(tensors) -> str:
    h = hashlib.sha256()
    for t in tensors:
        t = t.to_local() if isinstance(t, DTensor) else t
        h.update(t.detach().cpu().contiguous().numpy().tobytes())
    return h.hexdigest()[:16]


state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
print(f"rank {rank} losses {digest(losses)} parameters {digest(stage.parameters())} state {digest(state)}", flush=True)
if os.environ.get("HOLD"):
    pathlib.Path(f"ready-{rank}").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
dist.destroy_process_group()
