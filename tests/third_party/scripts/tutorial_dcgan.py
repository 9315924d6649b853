"""DCGAN, as in PyTorch's tutorial: two networks, two optimizers, noise drawn on the host."""

import report
import torch
from torch import nn

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.manual_seed(999)


def weights_init(m: nn.Module) -> None:
    if "Conv" in type(m).__name__:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif "BatchNorm" in type(m).__name__:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


generator = nn.Sequential(
    nn.ConvTranspose2d(16, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
    nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
    nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh(),
)  # fmt: skip
discriminator = nn.Sequential(
    nn.Conv2d(3, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(32, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
)  # fmt: skip
generator.apply(weights_init).to(device)
discriminator.apply(weights_init).to(device)
criterion = nn.BCELoss()
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
for _ in range(4):
    discriminator.zero_grad()
    real = torch.rand(8, 3, 16, 16).to(device)
    label = torch.full((8,), 1.0, dtype=torch.float, device=device)
    loss_real = criterion(discriminator(real).view(-1), label)
    loss_real.backward()
    fake = generator(torch.randn(8, 16, 1, 1).to(device))
    label.fill_(0.0)
    loss_fake = criterion(discriminator(fake.detach()).view(-1), label)
    loss_fake.backward()
    optimizer_d.step()
    generator.zero_grad()
    label.fill_(1.0)
    loss_g = criterion(discriminator(fake).view(-1), label)
    loss_g.backward()
    optimizer_g.step()
    report.loss(loss_real + loss_fake)
    report.loss(loss_g)
report.weights(generator, discriminator)
