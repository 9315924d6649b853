"""sparse_gradients.py: DDP cannot average sparse gradients over NCCL, and says so."""

import torch
import torch.distributed as dist
from expect import raises
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
model = DistributedDataParallel(torch.nn.Embedding(10, 3, sparse=True).cuda(), device_ids=[0])
loss = model(torch.tensor([1, 4], device="cuda")).sum()
raises(RuntimeError, "Backend nccl does not support allreduce sparse", loss.backward)
assert model.module.weight.sum().isfinite().item()
print("raised")
