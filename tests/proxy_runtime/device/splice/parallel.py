"""Fully sharded, tensor-parallel and pipeline training, and mixes of them: ranks that share little.

It imports nothing of ours. Mixes are of halves: of 4 ranks, 2 by 2.
"""

import argparse
import hashlib
import os
import pathlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

parser = argparse.ArgumentParser()
parser.add_argument("mode", choices=["fsdp", "hsdp", "tp", "pp", "pp_1f1b", "tp_dp", "tp_fsdp"])
parser.add_argument("steps", type=int, nargs="?", default=6)
parser.add_argument("hurry", type=pathlib.Path, nargs="?", help="half a second a step until this file is there")
parser.add_argument("--width", type=int, default=64)
args = parser.parse_args()
mode, width = args.mode, args.width
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
half = world // 2
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 8)).cuda()
stage: nn.Module = model
replicas: dist.ProcessGroup | None = None  # who averages gradients here by hand
schedule: Schedule1F1B | None = None
tensor_parallel = {"0": ColwiseParallel(), "2": RowwiseParallel()}
first, peer = rank < half, (rank + half) % world  # of a pipeline of two stages
data_seed = rank
if mode == "fsdp":
    mesh = init_device_mesh("cuda", (world,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
elif mode == "hsdp":
    mesh = init_device_mesh("cuda", (half, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
elif mode == "tp":
    stage = parallelize_module(model, init_device_mesh("cuda", (world,)), tensor_parallel)
    data_seed = 0
elif mode in ("tp_dp", "tp_fsdp"):
    mesh = init_device_mesh("cuda", (half, 2), mesh_dim_names=("data", "tensor"))
    stage = parallelize_module(model, mesh["tensor"], tensor_parallel)
    data_seed = mesh.get_local_rank("data")
    if mode == "tp_fsdp":
        fully_shard(stage, mesh=mesh["data"])
    else:
        replicas = mesh.get_group("data")
else:
    stage = model[:2] if first else model[2:]
    data_seed = rank % half
    mesh = init_device_mesh("cuda", (2, half), mesh_dim_names=("stage", "data"))
    replicas = mesh.get_group("data")
    if mode == "pp_1f1b":
        part = PipelineStage(stage, int(not first), 2, torch.device("cuda"), group=mesh.get_group("stage"))
        schedule = Schedule1F1B(part, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2, foreach="tp" not in mode)
data = torch.Generator().manual_seed(data_seed)
losses = []
for _ in range(args.steps):
    x, y = torch.randn(8, 32, generator=data).cuda(), torch.randint(0, 8, (8,), generator=data).cuda()
    if schedule is not None and first:
        schedule.step(x)
    elif schedule is not None:
        schedule.step(target=y, losses=(found := []))
        losses += [loss.detach() for loss in found]
    elif mode == "pp" and first:
        hidden = stage(x)
        dist.send(hidden.detach(), peer)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, peer)
        hidden.backward(gradient)
    elif mode == "pp":
        hidden = torch.empty(8, width, device="cuda")
        dist.recv(hidden, peer)
        hidden.requires_grad_()
        loss = nn.functional.cross_entropy(stage(hidden), y)
        loss.backward()
        assert hidden.grad is not None
        dist.send(hidden.grad, peer)
        losses.append(loss.detach())
    else:
        loss = nn.functional.cross_entropy(stage(x), y)
        loss.backward()
        losses.append(loss.detach())
    if replicas is not None:
        for parameter in stage.parameters():
            gradient = parameter.grad
            assert gradient is not None
            dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=replicas)
    if mode in ("fsdp", "hsdp"):  # not of tensors of two kinds
        nn.utils.clip_grad_norm_(stage.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    if args.hurry is not None and not args.hurry.exists():
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
