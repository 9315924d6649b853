"""Training steps of one of several small models, on the accelerator if there is one; see `_serving.py`.

steps.py WORKLOAD
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _serving import channel_stats, serve
from torch import nn
from torch.nn import functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Step = Callable[[], torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.wide(self.after(x))


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int, length: int, letters: int = 96) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)
        self.head.weight = self.letters.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.letters(tokens) + self.places(places))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 64, num_layers=2, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def convolutions() -> nn.Module:
    def part(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*part(3, 16), *part(16, 32), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def classify(model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer], *shape: int) -> Step:
    model = model.to(DEVICE)
    optimizer = make(model)
    inputs = [torch.randn(*shape) for _ in range(4)]
    labels = [torch.randint(10, shape[:1]) for _ in range(4)]
    turn = 0

    def step() -> torch.Tensor:
        nonlocal turn
        turn = (turn + 1) % 4
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs[turn].to(DEVICE)), labels[turn].to(DEVICE))
        loss.backward()
        optimizer.step()
        return loss.detach()

    step.model = model  # type: ignore[attr-defined]
    return step


def predict(width: int, length: int, batch: int, *, bf16: bool = False, layers: int = 4, **options: Any) -> Step:
    model = Gpt(width, layers, length).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    texts = [torch.randint(96, (batch, length + 1)) for _ in range(4)]
    turn = 0

    def step() -> torch.Tensor:
        nonlocal turn
        turn = (turn + 1) % 4
        text = texts[turn].to(DEVICE)
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
            scores = model(text[:, :-1])
            loss = functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    step.model = model  # type: ignore[attr-defined]
    return step


def adam(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)


def data_parallel() -> Step:
    from torch.distributed import init_process_group
    from torch.nn.parallel import DistributedDataParallel

    init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    model = perceptron().to(DEVICE)
    return classify(DistributedDataParallel(model), sgd, 64, 64)


WORKLOADS: dict[str, Callable[[], Step]] = {
    "mlp": lambda: classify(perceptron(), sgd, 64, 64),
    "cnn": lambda: classify(convolutions(), adam(foreach=True), 32, 3, 32, 32),
    "gpt_64_fused": lambda: predict(64, 32, 2, fused=True),
    "gpt_64_foreach": lambda: predict(64, 32, 2, foreach=True),
    "gpt_256_fused": lambda: predict(256, 64, 4, fused=True),
    "gpt_64_bf16": lambda: predict(64, 32, 2, bf16=True, fused=True),
    "lstm": lambda: classify(Recurrent(), adam(foreach=True), 16, 24, 32),
    "ddp": data_parallel,
}


def main() -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    step = WORKLOADS[sys.argv[1]]()
    losses: list[torch.Tensor] = []

    def window(steps: int) -> dict[str, Any]:
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = step()
        last = loss.item()
        took = time.perf_counter() - began
        losses.append(torch.tensor(last))
        return {"seconds": took, "cpu_s": time.process_time() - cpu}

    def digest() -> dict[str, Any]:
        total = hashlib.sha256(torch.stack(losses).numpy().tobytes())
        for parameter in step.model.parameters():  # type: ignore[attr-defined]
            total.update(parameter.detach().cpu().numpy().tobytes())
        return {"digest": total.hexdigest(), "stats": channel_stats()}

    serve({"window": window, "digest": digest})


if __name__ == "__main__":
    main()
