"""Ends right behind a backward pass while the autograd engine's thread, which gets little time, still clears up."""

import os
from pathlib import Path

import torch


class Twice(torch.autograd.Function):
    """Its graph holds objects of Python's."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def backward() -> None:
    kept = torch.ones(4, device="cuda", requires_grad=True)
    Twice.apply(kept).sum().backward()
    Twice.apply(torch.ones(4, device="cuda", requires_grad=True)).sum().backward()


(torch.ones(4, device="cuda", requires_grad=True) * 2).sum().backward()
core = min(os.sched_getaffinity(0))
threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
engine = [tid for tid in threads if Path(f"/proc/self/task/{tid}/comm").read_text().startswith("pt_autograd")]
assert engine
for tid in (0, *engine):
    os.sched_setaffinity(tid, {core})
for tid in engine:  # whenever the main thread can run, this one does not
    os.sched_setscheduler(tid, os.SCHED_IDLE, os.sched_param(0))
backward()
print("end", flush=True)
