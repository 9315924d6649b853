"""A training script of many shapes, for jobs whose ranks share a device. Ordinary PyTorch: it imports nothing of ours.

Prints one line: hashes of losses, parameters, buffers, optimizer state and generator states, and how often it
clipped and had parameters without gradients.
"""

import argparse
import contextlib
import hashlib
import math
import os
import pathlib
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="mlp", choices=["mlp", "gpt", "cnn", "lstm"])
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--optimizer", default="adamw")
parser.add_argument("--mode", default="foreach", choices=["foreach", "fused", "loop"])
parser.add_argument("--clip", action="store_true")
parser.add_argument("--gbv", action="store_true", help="gradients are views of the buckets")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--keep-grads", action="store_true", help="zero_grad(set_to_none=False)")
parser.add_argument("--ema", action="store_true")
parser.add_argument("--same-data", action="store_true")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--sync-bn", action="store_true")
parser.add_argument("--own-order", action="store_true", help="the same few batches, by each rank in its own order")
parser.add_argument("--unused", action="store_true", help="parameters used by no rank, by all or by one, in turns")
parser.add_argument("--scaler", action="store_true", help="GradScaler, with an overflow in every fifth step")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--own-parameters", action="store_true", help="something each rank trains for itself")
parser.add_argument("--local", type=int, default=0, help="average parameters every n steps, and gradients never")
parser.add_argument("--extra", action="store_true", help="rank 0 does more than the others")
parser.add_argument("--host-wait", action="store_true", help="a rank's host waits for another's, by a file")
parser.add_argument("--no-buffers", action="store_true", help="batch norm's statistics are each rank's own")
parser.add_argument("--pause", type=float, default=0.0, help="seconds of the host per step")
parser.add_argument("--pause-until", type=pathlib.Path, default="never", help="no pauses once this file is there")
args = parser.parse_args()
if args.bf16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
    torch.backends.mkldnn.enabled = False  # torch asks oneDNN for a cell that it does not have on this processor
CLIP = 0.2  # of all these models' gradients


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(args.dropout))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, 4, d // 4).transpose(1, 2) for y in self.qkv(self.ln1(x)).chunk(3, -1))
        a = torch.softmax((q @ k.transpose(-1, -2)) / math.sqrt(d // 4), -1) @ v
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(64, d), nn.Parameter(torch.zeros(16, d))
        self.blocks, self.head = nn.Sequential(Block(d), Block(d)), nn.Linear(d, 64)

    def forward(self, x):
        return self.head(self.blocks(self.embedding(x) + self.position)).flatten(0, 1)


class Lstm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(64, d), nn.LSTM(d, d, batch_first=True), nn.Linear(d, 64)

    def forward(self, x):
        return self.head(self.lstm(self.embedding(x))[0]).flatten(0, 1)


class Partly(nn.Module):
    """Its second half is not used in every step."""

    def __init__(self, inner: nn.Module, d: int) -> None:
        super().__init__()
        self.inner, self.rare, self.used = inner, nn.Linear(64 if args.model in ("gpt", "lstm") else 10, d), False

    def forward(self, x):
        y = self.inner(x)
        if self.used:
            y = y + self.rare(y).sum(-1, keepdim=True)
        return y


def make_model():
    d = args.width
    if args.model == "gpt":
        return Gpt(d)
    if args.model == "lstm":
        return Lstm(d)
    if args.model == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10),
        )  # fmt: skip
    return nn.Sequential(
        nn.Linear(16, d), nn.BatchNorm1d(d), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(d, d), nn.ReLU(),
        nn.Linear(d, 10),
    )  # fmt: skip


def batch(generator):
    if args.model in ("gpt", "lstm"):
        x = torch.randint(0, 64, (4, 16), generator=generator)
        return x.cuda(), x.roll(-1, 1).flatten().cuda()
    shape = (8, 1, 8, 8) if args.model == "cnn" else (8, 16)
    return torch.randn(shape, generator=generator).cuda(), torch.randint(0, 10, (8,), generator=generator).cuda()


def digest(tensors) -> str:
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"-")
    return h.hexdigest()[:16]


dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
partly = Partly(make_model(), args.width)
model = (partly if args.unused else partly.inner).cuda()
if args.sync_bn:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
ddp = model
if not args.local:
    ddp = DistributedDataParallel(
        model,
        gradient_as_bucket_view=args.gbv,
        find_unused_parameters=args.unused,
        broadcast_buffers=not args.no_buffers,
    )
torch.manual_seed(7 if args.same_data else 100 + rank)
data = torch.Generator().manual_seed(1 if args.same_data or args.own_order else 50 + rank)
order, batches = torch.Generator().manual_seed(50 + rank), [batch(data) for _ in range(8 if args.own_order else 0)]
how: dict[str, Any] = {"foreach": args.mode == "foreach"} | ({"fused": True} if args.mode == "fused" else {})
parameters = list(ddp.parameters())
kinds = {
    "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-3, **how),
    "adam": lambda: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True, **how),
    "sgd": lambda: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, **how),
    "rmsprop": lambda: torch.optim.RMSprop(parameters, lr=1e-3, foreach=args.mode == "foreach"),
}
optimizer = kinds[args.optimizer]()
own = torch.nn.Parameter(torch.full((1500,), 1.0 + rank).cuda())
own_optimizer = torch.optim.SGD([own], lr=0.1)
average = [p.detach().clone() for p in parameters] if args.ema else []
scaler = torch.amp.GradScaler("cuda", enabled=args.scaler, init_scale=1024.0, growth_interval=3)
criterion = nn.CrossEntropyLoss()
losses, norms, unused = [], [], 0
for step in range(args.steps):
    partly.used = (False, True, rank == step // 3 % world)[step % 3]
    for micro in range(args.accumulate):
        x, y = batches[torch.randint(8, (), generator=order)] if batches else batch(data)
        last = micro == args.accumulate - 1
        with ddp.no_sync() if isinstance(ddp, DistributedDataParallel) and not last else contextlib.nullcontext():
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.bf16):
                loss = criterion(ddp(x), y)
            if args.scaler and step % 5 == 2 and rank == step // 5 % world:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
    unused += any(p.grad is None for p in parameters)
    if args.extra and rank == 0:
        losses.append(sum(p.grad.square().sum() for p in parameters if p.grad is not None))
        print("norm", losses[-1].item(), flush=True)
    if args.host_wait:
        flag = pathlib.Path(f"step-{step}")
        if rank == 0:  # it asks for a number that no other rank has sent for yet
            parameters[0].grad.sum().item()
            flag.touch()
        while not flag.exists():
            time.sleep(0.001)
    if args.clip:
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, CLIP))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=not args.keep_grads)
    if args.local and step % args.local == args.local - 1:
        for p in parameters:
            dist.all_reduce(p.detach())
            p.detach().div_(world)
    if args.own_parameters:
        own_optimizer.zero_grad()
        (own.square().sum() * loss.detach()).backward()
        own_optimizer.step()
    if args.ema:
        for a, p in zip(average, parameters, strict=True):
            a.lerp_(p.detach(), 0.1)
    losses.append(loss.detach())
    if args.pause and not args.pause_until.exists():
        time.sleep(args.pause)
torch.cuda.synchronize()
state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
print(
    f"rank {rank} losses {digest(losses)} parameters {digest(parameters)} buffers {digest(ddp.buffers())}",
    f"state {digest(state)} own {digest([own])} average {digest(average)} scale {scaler.get_scale()}",
    f"random {digest([torch.cuda.get_rng_state(), torch.get_rng_state()])}",
    f"clipped {sum(norm.item() > CLIP for norm in norms)} unused {unused}",
    flush=True,
)
if os.environ.get("HOLD"):
    pathlib.Path(f"ready-{rank}").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
dist.destroy_process_group()
