"""A compiled library that is loaded in the middle of training, in the way that the second argument names."""

import ctypes
import importlib.util
import sys

import torch

from ergo_rank import _interposer

path, how = sys.argv[1:]
x = torch.arange(4.0, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([x], 0.5)
for step in range(4):
    if step == 2:
        if how == "ctypes":
            ctypes.CDLL(path)
        elif how == "torch":
            torch.ops.load_library(path)
        else:
            spec = importlib.util.spec_from_file_location("late", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    y = x * 2 if step < 2 else torch.ops.late.both(x)
    optimizer.zero_grad()
    y.sum().backward() if step < 2 else (x * y.detach()).sum().backward()
    optimizer.step()

host = x.detach().cpu()
assert torch.equal(torch.ops.late.both(x.detach()).cpu(), host * 2)
# Its shape depends on contents, and no tag says so.
for values in ([1.0, -1, 2], [-1.0, -1, -1], [1.0, 1, 1]):
    t = torch.tensor(values)
    assert torch.equal(torch.ops.late.positive(t.cuda()).cpu(), t[t > 0])
assert torch.equal(torch.ops.late.cpu_only(host.cuda()).cpu(), host + 1)
assert torch.equal(torch.ops.late.composite(host.cuda()).cpu(), host * 3)
try:
    torch.ops.late.cuda_only(host.cuda())
except NotImplementedError as error:
    assert "late::cuda_only" in str(error), error
else:
    raise AssertionError("a CUDA kernel ran in the rank")
assert _interposer.channel_stats()["refused"] == 0
print("ok")
