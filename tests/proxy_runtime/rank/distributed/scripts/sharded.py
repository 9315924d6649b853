"""FSDP2, HSDP and FSDP1. FSDP1 has no CPU form: there, plain DDP says what it must compute."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from same import DEVICE, KIND, ON_DEVICE, WORLD, begin, case, digest, end, values
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

begin()
HALVES = (2, WORLD // 2) if WORLD >= 4 else (1, WORLD)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 33), nn.Linear(33, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(16, 5)).to(DEVICE)


def train(model: nn.Module, clip: bool = False) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = torch.zeros(())
    for step in range(3):
        optimizer.zero_grad()
        loss = model(values(8, 16, seed=step).clamp(-3, 3)).float().square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return loss, optimizer


def fsdp2(mesh: DeviceMesh | None = None, clip: bool = False, **arguments: Any) -> tuple[str, nn.Module]:
    model, mesh = net(), mesh or init_device_mesh(KIND, (WORLD,))
    for module in [*list(model)[:2], model]:
        fully_shard(module, mesh=mesh, **arguments)
    loss, _ = train(model, clip)
    return digest(loss, *model.parameters()), model


FSDP2 = {
    "fsdp2": {},
    "fsdp2_clipped": {"clip": True},
    "fsdp2_kept_gathered": {"reshard_after_forward": False},
    "fsdp2_bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}
for name, arguments in FSDP2.items():

    def two(arguments: dict[str, Any] = arguments) -> str:
        return fsdp2(**arguments)[0]

    two.__name__ = name
    case(two)


@case
def hybrid() -> str:
    return fsdp2(init_device_mesh(KIND, HALVES, mesh_dim_names=("replicate", "shard")))[0]


@case
def hybrid_replicated() -> str:
    shape = HALVES if WORLD >= 4 else (WORLD, 1)
    return fsdp2(init_device_mesh(KIND, shape, mesh_dim_names=("replicate", "shard")))[0]


@case
def offloaded() -> str:
    model = net()
    for module in [*list(model)[:2], model]:
        fully_shard(module, offload_policy=CPUOffloadPolicy(pin_memory=ON_DEVICE))
    loss, _ = train(model)
    return digest(loss, *(parameter.to_local() for parameter in model.parameters()))


@case
def state_dicts() -> str:
    _, model = fsdp2()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    sharded = get_model_state_dict(model)
    set_model_state_dict(model, sharded)
    return digest(*full.values()) + digest(*sharded.values())


@case
def accumulated() -> str:
    model = net()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        model(values(8, 16, seed=step)).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return digest(*model.parameters())


@case
def from_meta() -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 5))
    fully_shard(model)
    model.to_empty(device=DEVICE)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    loss, _ = train(model)
    return digest(loss, *model.parameters())


def fsdp1(**arguments: Any) -> FullyShardedDataParallel:
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(net(), auto_wrap_policy=policy, device_id=torch.device("cuda", 0), **arguments)


class Cast(nn.Module):
    """What FSDP1's mixed precision does to the parameters and inputs of a module."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lowered = {name: parameter.to(self.dtype) for name, parameter in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, lowered, (x.to(self.dtype),))


def divided_twice(state, bucket):  # DDP refuses annotations that are text
    """Averages as FSDP1 does: part of the division before the sum, part of it after."""
    total = bucket.buffer().div_(state.gradient_predivide_factor)
    future = dist.all_reduce(total, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].div_(state.gradient_postdivide_factor))


def parallel(module: nn.Module) -> nn.Module:
    model = DistributedDataParallel(module)
    model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), divided_twice)
    return model


def trained_fsdp1(native: nn.Module | None = None, **arguments: Any) -> str:
    """The whole parameters after training; natively those of DDP."""
    if not ON_DEVICE:
        model = parallel(native or net())
        train(model)
        return digest(*model.parameters())
    sharded = fsdp1(use_orig_params=True, **arguments)
    train(sharded)
    with FullyShardedDataParallel.summon_full_params(sharded):
        return digest(*sharded.parameters())


FSDP1 = {
    "fsdp1_full": {"sharding_strategy": ShardingStrategy.FULL_SHARD},
    "fsdp1_gradients": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "fsdp1_none": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "fsdp1_offloaded": {"cpu_offload": CPUOffload(offload_params=True)},
    "fsdp1_bf16": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)},
}
for name, arguments in FSDP1.items():

    def one(arguments: dict[str, Any] = arguments) -> str:
        return trained_fsdp1(Cast(net(), torch.bfloat16) if "mixed_precision" in arguments else None, **arguments)

    one.__name__ = name
    case(one)


@case
def fsdp1_hybrid() -> str:
    mesh = init_device_mesh(KIND, HALVES, mesh_dim_names=("replicate", "shard"))
    return trained_fsdp1(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)


@case
def fsdp1_state_dicts() -> str:
    if not ON_DEVICE:
        whole = parallel(net())
        train(whole)
        return digest(*whole.state_dict().values())
    model = fsdp1()
    _, optimizer = train(model)
    for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.FULL_STATE_DICT):
        with FullyShardedDataParallel.state_dict_type(model, kind):
            found = model.state_dict()
            model.load_state_dict(found)
            state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.load_state_dict(model.state_dict())
    return digest(*found.values())


end()
