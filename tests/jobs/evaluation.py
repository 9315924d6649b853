"""One rank or several apart: a little training, then a long evaluation loop that never reaches an optimizer step."""

import argparse
import random
import time

import _job
import torch
import torch.nn as nn
from torch.nn.functional import cross_entropy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds of a host phase or sleep")
    args = parser.parse_args()
    job = _job.start()
    device = job.device
    torch.manual_seed(job.rank)
    shapes, host = random.Random(5 + job.rank), torch.Generator().manual_seed(1 + job.rank)

    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    square = torch.randn(256, 256, generator=host).to(device) / 16
    big = torch.zeros(3_000_000, device=device)

    def train(steps: int) -> None:
        model.train()
        for _ in range(steps):
            x, y = torch.randn(16, 64, generator=host), torch.randint(10, (16,), generator=host)
            loss = cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.see(loss.item())

    @torch.no_grad()
    def evaluate(n: int) -> None:
        x = torch.randn(shapes.randint(1, 60), 64, generator=host)
        out = model(x.to(device))  # still in training mode: dropout draws on the device
        job.see(out.softmax(-1).max(-1)[0].sum().item(), (out * n).abs().mean().item())
        if n % 7 == 0:
            found = (out > 0.1).nonzero()
            job.see(found, out[out > 0.1].sum().item())
        if n % 9 == 0:
            chain = square
            for _ in range(60):  # a long run of queued operations, then one wait
                chain = (chain @ square).tanh() + torch.rand(256, 256, device=device) * 1e-3
            job.see(chain.sum().item())
        if n % 20 == 5:
            big.copy_(torch.randn(big.shape[0], generator=host))
            big.mul_(1.5)
            job.see(big)
        if n % 40 == 9:
            _job.compute_on_host(args.pause)
        if n % 40 == 19:
            time.sleep(args.pause)

    train(20)
    for n in range(args.rounds):
        evaluate(n)
        if n % 10 == 0:
            job.progress(n)
    train(20)
    job.see(*model.state_dict().values(), _job.device_rng_state(device))
    job.result()


if __name__ == "__main__":
    main()
