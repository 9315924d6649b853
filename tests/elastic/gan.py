"""A DCGAN in DistributedDataParallel: two models, two optimizers, noise drawn there. It imports nothing of ours."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

steps = int(sys.argv[1])
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.manual_seed(999)
# Each forward of the discriminator has another batch: its statistics stay a rank's own.
made = nn.Sequential(
    nn.ConvTranspose2d(8, 16, 4, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
    nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh(),
)  # fmt: skip
judge = nn.Sequential(
    nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(16, 16, 4, 2, 1, bias=False),
    nn.BatchNorm2d(16), nn.LeakyReLU(0.2, inplace=True), nn.Flatten(), nn.Linear(64, 1),
)  # fmt: skip
generator = DistributedDataParallel(made.cuda(), broadcast_buffers=False)
discriminator = DistributedDataParallel(judge.cuda(), broadcast_buffers=False)
criterion = nn.BCEWithLogitsLoss()
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
torch.manual_seed(rank)
data = torch.Generator().manual_seed(50 + rank)
ones, zeros = torch.ones(8, 1, device="cuda"), torch.zeros(8, 1, device="cuda")
for step in range(steps):
    real = torch.rand(8, 1, 8, 8, generator=data).cuda()
    fake = generator(torch.randn(8, 8, 1, 1, device="cuda"))
    optimizer_d.zero_grad()
    loss_d = criterion(discriminator(torch.cat([real, fake.detach()])), torch.cat([ones, zeros]))
    loss_d.backward()
    optimizer_d.step()
    optimizer_g.zero_grad()
    loss_g = criterion(discriminator(fake), ones)
    loss_g.backward()
    optimizer_g.step()
    if step % 20 == 0:
        print(f"step {step} {loss_d.item().hex()} {loss_g.item().hex()}", flush=True)
dist.destroy_process_group()
