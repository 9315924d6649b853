"""Trains a small character-level GPT on the sources of Python's own standard library.

    python examples/char_gpt.py --steps 200
    torchrun --nproc-per-node 2 examples/char_gpt.py --steps 200

An ordinary PyTorch script: CUDA if there is one, else CPU; DistributedDataParallel if there are several ranks.
Weights are initialised and batches drawn on the CPU, so that with ``--dropout 0`` the device draws no random number.
"""

import argparse
import contextlib
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from _report import LossLog, add_report_arguments
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

VOCABULARY = 128  # ASCII; anything else becomes a question mark
HEAD_SIZE = 32


class Block(nn.Module):
    """Pre-norm transformer block with causal self-attention."""

    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        self.heads = max(1, d_model // HEAD_SIZE)
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.mlp(self.norm2(x)))


class CharGPT(nn.Module):
    """Decoder-only transformer over characters; the output layer shares the embedding's weight."""

    def __init__(self, d_model: int, layers: int, context: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(VOCABULARY, d_model)
        self.position = nn.Embedding(context, d_model)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(d_model, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, length, vocabulary) for tokens (batch, length)."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def encode(text: str) -> torch.Tensor:
    """Characters to token numbers, on the CPU."""
    return torch.tensor(list(text.encode("ascii", errors="replace")))


def load_text(limit: int) -> str:
    """The standard library's top-level modules in order of name, cut at `limit` characters."""
    text = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= limit:
            break
    return text[:limit]


def sample_batch(
    data: torch.Tensor, batch: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of the text and the same windows one character later."""
    starts = torch.randint(len(data) - context - 1, (batch,), generator=generator).tolist()
    windows = torch.stack([data[start : start + context + 1] for start in starts])
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@torch.no_grad()
def evaluate(model: nn.Module, data: torch.Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Mean loss over a few fixed batches of held-out text, averaged over the ranks."""
    model.eval()
    generator = torch.Generator().manual_seed(1234)
    total = torch.zeros((), device=device)
    for _ in range(args.eval_batches):
        x, y = sample_batch(data, args.batch, args.context, generator)
        total += cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten())
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    model.train()
    return total.item() / args.eval_batches


def make_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=lr, foreach=name == "adamw-foreach", fused=name == "adamw-fused")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small character GPT on Python's standard library.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=64, help="characters per sequence")
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--optimizer", choices=["adamw-foreach", "adamw-fused", "sgd"], default="adamw-foreach")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--bf16", action="store_true", help="forward pass under bfloat16 autocast")
    parser.add_argument("--text-size", type=int, default=1_000_000, help="characters of text")
    parser.add_argument("--eval-every", type=int, default=0, help="evaluate every n steps (0: never)")
    parser.add_argument("--eval-batches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    add_report_arguments(parser, default_out="out/char_gpt")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(args.seed)
    net = CharGPT(args.d_model, args.layers, args.context, args.dropout).to(device)
    model: nn.Module = net
    if world_size > 1:
        model = nn.parallel.DistributedDataParallel(net, device_ids=[local_rank] if cuda else None)
    optimizer = make_optimizer(args.optimizer, model, args.lr)

    data = encode(load_text(args.text_size))
    train, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    batches = torch.Generator().manual_seed(args.seed * 1000 + rank)
    torch.manual_seed(args.seed * 1000 + rank)  # ranks drop different units

    log = LossLog(args, rank)
    log.start()
    for step in range(1, args.steps + 1):
        x, y = (part.to(device) for part in sample_batch(train, args.batch, args.context, batches))
        autocast = torch.autocast(device.type, dtype=torch.bfloat16) if args.bf16 else contextlib.nullcontext()
        with autocast:
            loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.step(loss)
        if args.eval_every and step % args.eval_every == 0:
            log.evaluation("held-out loss", evaluate(net, held_out, args, device))

    log.finish(net)
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
