"""Trains small models and prints digests of every loss and of the final weights; runs on the CPU as well."""

import hashlib
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
if "--native" in sys.argv:
    device, kind = torch.device("cpu"), "cpu"
else:
    device, kind = torch.device("cuda"), "cuda"


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = (
            p.view(b, t, self.heads, w // self.heads).transpose(1, 2) for p in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary: int = 50, width: int = 32, layers: int = 2, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


def digest(tensors) -> str:
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def train(name: str, model: nn.Module, make_optimizer, batches, steps: int = 12, amp: bool = False) -> None:
    model = model.to(device)
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for step in range(steps):
        x, y = batches(step)
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=amp):
            out = model(x.to(device))
            loss = F.cross_entropy(out.flatten(0, -2), y.to(device).flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    print(name, digest(losses)[:16], digest(model.state_dict().values())[:16], flush=True)


def tokens(step: int):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 50, (4, 17), generator=g)
    return ids[:, :-1], ids[:, 1:]


def images(step: int):
    g = torch.Generator().manual_seed(step)
    return torch.randn(8, 1, 12, 12, generator=g), torch.randint(0, 10, (8,), generator=g)


def vectors(step: int):
    g = torch.Generator().manual_seed(step)
    return torch.randn(16, 20, generator=g), torch.randint(0, 10, (16,), generator=g)


def seeded(make):
    torch.manual_seed(0)
    return make()


train("mlp", seeded(lambda: nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10))),
      lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True), vectors)  # fmt: skip
train("cnn", seeded(Cnn), lambda p: torch.optim.AdamW(p, 1e-3, foreach=True), images)
train("gpt-foreach", seeded(Gpt), lambda p: torch.optim.AdamW(p, 1e-3, foreach=True), tokens)
train("gpt-fused", seeded(Gpt), lambda p: torch.optim.AdamW(p, 1e-3, fused=True), tokens)
train("gpt-bf16", seeded(Gpt), lambda p: torch.optim.AdamW(p, 1e-3, foreach=True), tokens, amp=True)
