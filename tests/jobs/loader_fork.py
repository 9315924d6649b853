"""DataLoader workers are forked anew every epoch, while operations are in flight."""

import argparse
import random

import _job
import torch
import torch.nn as nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset[tuple[torch.Tensor, int]]):
    """Samples that depend on their index and on the worker's own random numbers."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sample = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return sample + random.random() * 1e-3 + torch.rand(()) * 1e-3, index % 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    job = _job.start()
    device = job.device
    torch.manual_seed(job.rank)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    loader = DataLoader(Noise(), batch_size=16, shuffle=True, num_workers=2)
    square = torch.randn(256, 256).to(device) / 16
    for epoch in range(args.epochs):
        work = square
        for _ in range(40):
            work = (work @ square).tanh()
        for x, y in loader:
            loss = cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.see(loss.item())
        job.see(work.sum().item())
        job.progress(epoch)
    job.see(*model.state_dict().values())
    job.result()


if __name__ == "__main__":
    main()
