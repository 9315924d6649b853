"""Pipeline parallelism: every schedule, and a model that torch splits itself."""

from __future__ import annotations

import torch
from same import DEVICE, RANK, WORLD, begin, case, common, digest, end
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)

begin()


def part(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh()).to(DEVICE)


def loss_of(out: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (out - wanted).square().mean()


def run(schedule, indices: list[int], parts: list[nn.Module]) -> str:
    optimizer = torch.optim.SGD([p for module in parts for p in module.parameters()], lr=0.1)
    last = WORLD * len(parts) - 1
    found: list[torch.Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        inputs = [common(8, 16, seed=step)] if 0 in indices else []
        wanted = {"target": common(8, 16, seed=50 + step), "losses": found} if last in indices else {}
        schedule.step(*inputs, **wanted)
        optimizer.step()
    return digest(*found, *(p for module in parts for p in module.parameters()))


def one_stage(kind: type) -> str:
    module = part(RANK)
    schedule = kind(PipelineStage(module, RANK, WORLD, DEVICE), n_microbatches=4, loss_fn=loss_of)
    return run(schedule, [RANK], [module])


def two_stages(kind: type, folded: bool = False) -> str:
    indices = [RANK, 2 * WORLD - 1 - RANK if folded else RANK + WORLD]
    parts = [part(index) for index in indices]
    stages = [PipelineStage(module, i, 2 * WORLD, DEVICE) for module, i in zip(parts, indices, strict=True)]
    return run(kind(stages, n_microbatches=4, loss_fn=loss_of), indices, parts)


@case
def gpipe() -> str:
    return one_stage(ScheduleGPipe)


@case
def one_forward_one_backward() -> str:
    return one_stage(Schedule1F1B)


@case
def interleaved() -> str:
    return two_stages(ScheduleInterleaved1F1B)


@case
def breadth_first() -> str:
    return two_stages(ScheduleLoopedBFS)


@case
def zero_bubble() -> str:
    return two_stages(ScheduleInterleavedZeroBubble)


@case
def zero_bubble_folded() -> str:
    return two_stages(ScheduleZBVZeroBubble, folded=True)


@case
def traced() -> str:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(WORLD)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    torch.manual_seed(0)
    split = {f"layers.{i}": SplitPoint.BEGINNING for i in range(1, WORLD)}
    stage = pipeline(Layers(), mb_args=(torch.randn(2, 16),), split_spec=split).build_stage(RANK, device=DEVICE)
    schedule, found = ScheduleGPipe(stage, 4, loss_fn=loss_of), []
    if RANK == 0:
        schedule.step(common(8, 16))
    elif RANK == WORLD - 1:
        schedule.step(target=common(8, 16, seed=9), losses=found)
    else:
        schedule.step()
    return digest(*found, *(p.grad for p in stage.submod.parameters()))


end()
