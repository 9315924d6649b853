"""Operators whose kernels are Python functions, and the step counter."""

import torch

from ergo_rank import _interposer

library = torch.library.Library("mine", "DEF")
library.define("twice(Tensor x) -> Tensor")
calls: list[str] = []


def twice(x: torch.Tensor) -> torch.Tensor:
    calls.append("twice")
    return x * 2


library.impl("twice", twice, "CUDA")


@torch.library.custom_op("mine_too::increment", mutates_args=())
def increment(x: torch.Tensor) -> torch.Tensor:
    calls.append("increment")
    return x + 1


x = torch.ones(3, device="cuda")
_interposer.sweep()
assert torch.ops.mine.twice(x).tolist() == [2, 2, 2]
assert increment(x).tolist() == [2, 2, 2]
assert calls == ["twice", "increment"]

weight = torch.nn.Parameter(x)
optimizer = torch.optim.SGD([weight], 0.5)
for _ in range(3):
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
assert weight.tolist() == [-0.5, -0.5, -0.5]
assert _interposer.steps() == 3
