"""Pinned memory and copies that do not block: no value is ever torn."""

import os

import torch
from torch.utils.data import DataLoader, TensorDataset

host = torch.arange(3 << 20, dtype=torch.float32)
assert not host.is_pinned()
pinned = host.pin_memory()
assert pinned.is_pinned() and torch.equal(pinned, host) and torch.empty(4, pin_memory=True).is_pinned()
assert pinned[5:9].is_pinned() and not pinned.clone().is_pinned()

# What the buffer held at the call arrives, whatever the script does with it afterwards.
device = torch.empty(3 << 20, device="cuda")
for i in range(5):
    pinned.fill_(float(i))
    device.copy_(pinned, non_blocking=True)
    pinned.fill_(-1.0)
    torch.cuda.synchronize()
    assert (device == i).all().item(), i
copies = []
for i in range(20):
    block = torch.full((1 << 16,), float(i)).pin_memory()
    copies.append(block.to("cuda", non_blocking=True))
    del block  # its memory goes to the next one
assert all((copy == i).all().item() for i, copy in enumerate(copies))

# Back: complete after a synchronisation, of any size and offset.
for n in (1, 1000, (1 << 18) + 3, (3 << 20) - 5):
    source = torch.arange(n + 2, device="cuda", dtype=torch.float32)[1 : n + 1]
    target = torch.zeros(n, pin_memory=True)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(target, torch.arange(1, n + 1, dtype=torch.float32)), n
    assert torch.equal(source.to("cpu", non_blocking=True), target) and torch.equal(source.cpu(), target)
bytes_ = torch.arange((5 << 20) + 1, device="cuda").to(torch.uint8)
assert torch.equal(bytes_.cpu(), torch.arange((5 << 20) + 1).to(torch.uint8))

# A forked child has the pinned tensors of its parent, as with CUDA; what it pins and drops itself is not its parent's.
held, gone = (torch.full((1 << 18,), value).pin_memory() for value in (2.0, 3.0))
before = held.data_ptr()
del gone
if (child := os.fork()) == 0:
    assert (held == 2).all()
    held.fill_(4.0)
    del held
    others = [torch.full((1 << 18,), 5.0).pin_memory() for _ in range(4)]
    assert all(other.is_pinned() and (other == 5).all() for other in others)
    torch._C._host_emptyCache()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert held.data_ptr() == before and (held == 4).all(), (held.data_ptr(), before, held[:3])
again = torch.full((1 << 18,), 6.0).pin_memory()
assert (held == 4).all() and torch.equal(again.cuda().cpu(), again)

# What is dropped is used again; what is emptied takes no memory.
stats = torch.cuda.host_memory_stats()
del held, again
torch._C._host_emptyCache()
after = torch.cuda.host_memory_stats()
assert stats["active_bytes.current"] - after["active_bytes.current"] == 2 << 20, (stats, after)

loader = DataLoader(TensorDataset(torch.arange(40).view(20, 2)), batch_size=4, pin_memory=True, num_workers=1)
total = 0
for (batch,) in loader:
    assert batch.is_pinned()
    total += int(batch.to("cuda", non_blocking=True).sum().item())
assert total == sum(range(40))
print("ok")
