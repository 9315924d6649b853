"""A device of 64 MiB: what does not fit raises at its line, and everything is counted."""

from functools import partial

import torch
from expect import raises

MIB = 1 << 20
cuda = torch.cuda
assert cuda.mem_get_info() == (64 * MIB, 64 * MIB), cuda.mem_get_info()
assert cuda.get_device_properties(0).total_memory == 64 * MIB
assert torch.cuda.OutOfMemoryError is torch.OutOfMemoryError

a = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
assert cuda.memory_allocated() == 32 * MIB and cuda.mem_get_info()[0] == 32 * MIB
text = raises(torch.OutOfMemoryError, "CUDA out of memory", lambda: torch.empty(40 * MIB, dtype=torch.uint8).cuda())
assert "40.00 MiB" in text and "64.00 MiB" in text and "32.00 MiB is free" in text, text


# torch.accelerator has the same figures.
accelerator = torch.accelerator
if hasattr(accelerator, "memory_allocated"):
    assert accelerator.memory_allocated() == 32 * MIB == accelerator.max_memory_allocated()
    assert accelerator.memory_stats()["num_ooms"] == 1, accelerator.memory_stats()
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()
if hasattr(accelerator, "get_memory_info"):
    assert accelerator.get_memory_info() == (32 * MIB, 64 * MIB), accelerator.get_memory_info()


def twice(t: torch.Tensor) -> list[torch.Tensor]:
    return [t + t, t + t]


# The results of operators, known and unknown ones, and those whose size only the device knows.
b = torch.ones(4 * MIB, device="cuda")  # 16 MiB
small = torch.ones(8, device="cuda")
small = small + small
for _ in range(2):
    raises(torch.OutOfMemoryError, "16.00 MiB", partial(twice, b))
assert cuda.memory_allocated() <= 49 * MIB, cuda.memory_allocated()
raises(torch.OutOfMemoryError, "32.00 MiB", b.nonzero)
raises(torch.OutOfMemoryError, "", partial(a.resize_, 60 * MIB))
assert a.numel() == 60 * MIB or a.numel() == 32 * MIB
assert b.sum().item() == 4 * MIB, "an allocation that failed has changed something"

# As scripts do it.
del a, b
batch, done = 64, 0
while True:
    try:
        torch.ones(batch, MIB // 4, device="cuda").mul(2.0)
        break
    except torch.cuda.OutOfMemoryError:
        cuda.empty_cache()
        batch //= 2
        done += 1
assert (batch, done) == (16, 2) or (batch, done) == (32, 1), (batch, done)

cuda.reset_peak_memory_stats()
base = cuda.memory_allocated()
c = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
del c
assert cuda.memory_allocated() == base and cuda.max_memory_allocated() == base + 8 * MIB
assert cuda.memory_reserved() >= cuda.memory_allocated() and cuda.max_memory_reserved() >= cuda.max_memory_allocated()
stats = cuda.memory_stats()
assert stats["num_ooms"] >= 5, stats["num_ooms"]
assert stats["allocated_bytes.all.allocated"] - stats["allocated_bytes.all.freed"] == cuda.memory_allocated()
assert stats["allocation.all.current"] == stats["allocation.all.allocated"] - stats["allocation.all.freed"] > 0
assert "64" in cuda.memory_summary() or "Allocated memory" in cuda.memory_summary()
cuda.reset_accumulated_memory_stats()
assert cuda.memory_stats()["num_ooms"] == 0

cuda.set_per_process_memory_fraction(0.25)
assert cuda.get_per_process_memory_fraction() == 0.25
text = raises(torch.OutOfMemoryError, "16.00 MiB allowed", lambda: torch.empty(20 * MIB, dtype=torch.uint8).cuda())
raises(ValueError, "", lambda: cuda.set_per_process_memory_fraction(1.5))
cuda.set_per_process_memory_fraction(1.0)
torch.empty(20 * MIB, dtype=torch.uint8).cuda()
assert cuda.mem_get_info()[1] == 64 * MIB

# Training with gradients that do not fit gives its memory back.
layer = torch.nn.Linear(1024, 1024, device="cuda")
held = cuda.memory_allocated()
raises(torch.OutOfMemoryError, "", lambda: layer(torch.ones(16384, 1024, device="cuda")).square().sum().backward())
assert cuda.memory_allocated() <= held + 9 * MIB, (held, cuda.memory_allocated())
assert layer(torch.ones(2, 1024, device="cuda")).isfinite().all()
print("ok")
