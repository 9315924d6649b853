"""Tensor and sequence parallelism, DTensor operators, meshes, and distributed checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from same import DEVICE, KIND, RANK, WORLD, begin, case, common, digest, end, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor, full
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

begin()
MESH = init_device_mesh(KIND, (WORLD,))
SCRATCH = Path(sys.argv[1])


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down, self.out = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.down(torch.relu(self.up(self.norm(x)))))


def net() -> FeedForward:
    torch.manual_seed(0)
    return FeedForward().to(DEVICE)


def parallel(mesh=MESH) -> nn.Module:
    return parallelize_module(net(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def train(model: nn.Module) -> str:
    # On CUDA the optimizer would take its foreach form, which refuses DTensors beside plain tensors.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    loss = torch.zeros(())
    for step in range(3):
        optimizer.zero_grad()
        loss = model(common(4, 8, 16, seed=step)).square().mean()
        loss.backward()
        optimizer.step()
    return digest(loss, *model.parameters())


@case
def tensor_parallel() -> str:
    return train(parallel())


@case
def with_fsdp() -> str:
    shape = (2, WORLD // 2) if WORLD >= 4 else (1, WORLD)
    mesh = init_device_mesh(KIND, shape, mesh_dim_names=("data", "tensor"))
    model = parallel(mesh["tensor"])
    fully_shard(model, mesh=mesh["data"])
    return train(model)


@case
def sequence_parallel() -> str:
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    inner = parallelize_module(net(), MESH, plan)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            split = DTensor.from_local(x, MESH, [Replicate()]).redistribute(MESH, [Shard(1)])
            return inner.out(inner.down(torch.relu(inner.up(inner.norm(split)))))

    return train(Outer())


@case
def parallel_loss() -> str:
    torch.manual_seed(0)
    layer = nn.Linear(16, 8 * WORLD).to(DEVICE)
    layer = parallelize_module(layer, MESH, ColwiseParallel(use_local_output=False))
    with loss_parallel():
        loss = nn.functional.cross_entropy(layer(common(4, 16)), torch.arange(4, device=DEVICE))
        loss.backward()
    return digest(loss, layer.weight.grad)


@case
def embedding() -> str:
    torch.manual_seed(0)
    table = nn.Embedding(10 * WORLD, 6).to(DEVICE)
    table = parallelize_module(table, MESH, RowwiseParallel(input_layouts=Replicate()))
    rows = table(torch.arange(12, device=DEVICE) % (10 * WORLD))
    (rows * rows).sum().backward()
    return digest(rows, table.weight.grad)


@case
def operators() -> str:
    left = distribute_tensor(common(8, 12), MESH, [Shard(0)])
    product = left @ distribute_tensor(common(12, 8, seed=1), MESH, [Replicate()])
    turned = product.redistribute(MESH, [Shard(1)])
    uneven = distribute_tensor(common(7, 3), MESH, [Shard(0)])
    made = [product, turned, turned.sum(), turned.mean(), turned.max(), torch.softmax(turned, 1), turned.t()]
    made += [torch.cat([turned, turned]), turned[1:3], (uneven * 2).redistribute(MESH, [Shard(1)]), uneven.sum(0)]
    return digest(*made)


@case
def partial() -> str:
    whole = DTensor.from_local(values(4, 4), MESH, [Partial()])
    others = [DTensor.from_local(values(4, 4), MESH, [Partial(kind)]).full_tensor() for kind in ("avg", "max")]
    shards = [whole.redistribute(MESH, [Replicate()]), whole.redistribute(MESH, [Shard(0)])]
    return digest(*shards, *others, full((4, 4), 3.0, device_mesh=MESH, placements=[Shard(1)]))


@case
def distributed_module() -> str:
    def split(name: str, module: nn.Module, mesh: object) -> None:
        for key, value in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(value, MESH, [Shard(0)])))

    model = distribute_module(net(), MESH, split)
    out = model(distribute_tensor(common(4, 8, 16), MESH, [Replicate()]))
    out.square().mean().backward()
    return digest(out, *(parameter.grad for parameter in model.parameters()))


@case
def checkpoints() -> str:
    model = parallel()
    train(model)
    state = {"model": model.state_dict(), "x": torch.arange(5.0).to(DEVICE)}
    checkpoint.save(state, checkpoint_id=SCRATCH / "plain")
    other = parallel()
    loaded = {"model": other.state_dict(), "x": torch.zeros(5, device=DEVICE)}
    checkpoint.load(loaded, checkpoint_id=SCRATCH / "plain")
    other.load_state_dict(loaded["model"])
    saving = checkpoint.async_save(state, checkpoint_id=SCRATCH / "async", process_group=dist.new_group(backend="gloo"))
    saving.result()
    again = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}}
    checkpoint.load(again, checkpoint_id=SCRATCH / "async")
    return digest(*other.parameters(), loaded["x"], *again["model"].values())


@case
def meshes() -> object:
    mesh = init_device_mesh(KIND, (1, WORLD), mesh_dim_names=("a", "b"))
    return mesh.get_local_rank("b"), mesh.get_coordinate(), mesh.size(), mesh["b"].size(), RANK


end()
