"""DistributedDataParallel in all its modes, its communication hooks, and optimizers that share their state."""

from __future__ import annotations

import torch
import torch.distributed as dist
from same import BACKEND, DEVICE, ON_DEVICE, RANK, WORLD, begin, case, digest, end, values
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import quantization_pertensor_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

begin()


class Branch(nn.Module):
    """Uses one half of its parameters at a time, another half in every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.calls = nn.Linear(16, 8), nn.Linear(16, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.a(x) if (self.calls + RANK) % 2 else self.b(x)


def net(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), *([nn.BatchNorm1d(32)] if norm else []), nn.ReLU(), nn.Linear(32, 32), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(32, 4)).to(DEVICE)


def parallel(module: nn.Module | None = None, **arguments: object) -> DistributedDataParallel:
    place = {"device_ids": [0]} if ON_DEVICE else {}
    return DistributedDataParallel(net() if module is None else module, **place, **arguments)


def train(model: nn.Module, steps: int = 4, optimizer: torch.optim.Optimizer | None = None) -> str:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(values(8, 16, seed=step + 1).clamp(-3, 3)).square().mean()
        loss.backward()
        optimizer.step()
    return digest(loss, *model.parameters(), *model.buffers())


def hooked(state: object, hook: object, steps: int = 4) -> str:
    model = parallel()
    model.register_comm_hook(state, hook)
    return train(model, steps)


MODES = {
    "plain": lambda: parallel(),
    "small_buckets": lambda: parallel(bucket_cap_mb=0.002),
    "gradient_as_bucket_view": lambda: parallel(gradient_as_bucket_view=True),
    "static_graph": lambda: parallel(static_graph=True),
    "find_unused": lambda: parallel(Branch().to(DEVICE), find_unused_parameters=True),
    "find_unused_view": lambda: parallel(
        Branch().to(DEVICE), find_unused_parameters=True, gradient_as_bucket_view=True
    ),
    "buffers": lambda: parallel(net(norm=True)),
}
for name, make in MODES.items():

    def mode(make=make) -> str:
        return train(make())

    mode.__name__ = name
    case(mode)

HOOKS = {
    "hook_all_reduce": lambda: (None, default_hooks.allreduce_hook),
    "hook_bf16": lambda: (None, default_hooks.bf16_compress_hook),
    "hook_fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "hook_fp16_wrapper": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "hook_quantized": lambda: (dist.group.WORLD, quantization_pertensor_hook),
    "hook_power_sgd": lambda: (
        powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5),
        powerSGD_hook.powerSGD_hook,
    ),
    "hook_local_sgd": lambda: (
        post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], 2),
        post_localSGD_hook.post_localSGD_hook,
    ),
}
for name, make in HOOKS.items():

    def hook(make=make) -> str:
        return hooked(*make())

    hook.__name__ = name
    case(hook)


@case
def builtin_hook() -> str:
    model = parallel()
    if ON_DEVICE or WORLD == 2:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    else:  # the native run's tree is in Python (tests/support/tree_gloo.py), whose handles this hook does not take
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model)


@case
def synchronized_batch_norm() -> None:
    """torch has no such kernel natively on the CPU: it runs, and the ranks stay equal."""
    if not ON_DEVICE:
        return
    model = parallel(nn.SyncBatchNorm.convert_sync_batchnorm(net(norm=True)))
    train(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.detach())
        assert all(torch.equal(part, parts[0]) for part in parts)


@case
def join() -> str:
    model = parallel()
    with model.join():
        train(model, 3 + 2 * RANK)
    return digest(*model.parameters())


@case
def join_throws() -> str:
    model = parallel()
    try:
        with model.join(throw_on_early_termination=True):
            train(model, 2 + 2 * RANK)
    except RuntimeError as error:
        return str(error)[:60]
    return "nothing"


@case
def accumulation() -> str:
    model = parallel(gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with model.no_sync():
            model(values(8, 16, seed=step)).square().mean().backward()
        model(values(8, 16, seed=step + 9)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return digest(*model.parameters())


@case
def sharded_optimizer() -> str:
    model = parallel()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2)
    made = train(model, optimizer=optimizer)
    optimizer.consolidate_state_dict(0)
    if RANK == 0:
        made += digest(*(v for state in optimizer.state_dict()["state"].values() for v in state.values()))
    return made


@case
def sharded_optimizer_in_buckets() -> str:
    model = parallel(gradient_as_bucket_view=True)
    arguments = {"parameters_as_bucket_view": True, "lr": 1e-2, "momentum": 0.9}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, **arguments)
    return train(model, optimizer=optimizer)


@case
def local_sgd() -> str:
    model = parallel()
    state = post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], 2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(model, 6, PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2, warmup_steps=2)))


@case
def module_on_the_host() -> str:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 4), process_group=dist.new_group(backend="gloo"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(values(8, 16, seed=step, device="cpu")).square().mean().backward()
        optimizer.step()
    return digest(*model.parameters())


@case
def logging_data() -> object:
    model = parallel()
    train(model, 2)
    data = model._get_ddp_logging_data()
    assert data["backend_name"] == BACKEND
    return data["world_size"], data["num_parameter_tensors"]


end()
