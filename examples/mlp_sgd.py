"""Fits a multilayer perceptron to a random teacher network with SGD, momentum and gradient clipping.

    python examples/mlp_sgd.py --steps 300
    torchrun --nproc-per-node 2 examples/mlp_sgd.py --steps 300

The smallest of the examples: its steps are so short that what surrounds an operation costs as much as the operation.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from _report import LossLog, add_report_arguments
from torch.nn.functional import cross_entropy

INPUTS, CLASSES = 64, 10


def make_teacher(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights that label the data, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(INPUTS, 32, generator=generator), torch.randn(32, CLASSES, generator=generator)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fits an MLP to a random teacher with SGD and momentum.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64, help="samples per rank and step")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=3, help="hidden layers")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm (0: no clipping)")
    parser.add_argument("--seed", type=int, default=0)
    add_report_arguments(parser, default_out="out/mlp_sgd")
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
    layers: list[nn.Module] = [nn.Linear(INPUTS, args.width), nn.ReLU()]
    for _ in range(args.depth - 1):
        layers += [nn.Linear(args.width, args.width), nn.ReLU(), nn.Dropout(args.dropout)]
    net = nn.Sequential(*layers, nn.Linear(args.width, CLASSES)).to(device)
    model: nn.Module = net
    if world_size > 1:
        model = nn.parallel.DistributedDataParallel(net, device_ids=[local_rank] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    first, second = make_teacher(args.seed + 1)
    samples = torch.Generator().manual_seed(args.seed * 1000 + rank)
    torch.manual_seed(args.seed * 1000 + rank)  # ranks drop different units

    log = LossLog(args, rank)
    log.start()
    for _ in range(args.steps):
        x = torch.randn(args.batch, INPUTS, generator=samples)
        y = ((x @ first).tanh() @ second).argmax(1)
        loss = cross_entropy(model(x.to(device)), y.to(device), label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        schedule.step()
        log.step(loss)

    log.finish(net)
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
