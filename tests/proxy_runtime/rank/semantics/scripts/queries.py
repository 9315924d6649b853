"""Queries of a queue in which nothing is left but releases, while the device stands still."""

import sys

import torch

cuda = torch.cuda
side = cuda.Stream()
x = torch.ones(4, device="cuda")
y = x * 2
x.add_(1)  # unknown calls are waited for
generator = torch.Generator("cuda")
timed = cuda.Event(enable_timing=True)
timed.record()
cuda.synchronize()
print("ready", flush=True)
sys.stdin.readline()
del y, generator, timed
event = cuda.Event()
event.record()
done = (cuda.current_stream().query(), side.query(), event.query())
x.add_(1)
print(*done, cuda.current_stream().query(), event.query(), flush=True)
