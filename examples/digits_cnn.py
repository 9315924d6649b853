"""Trains a convolutional network with batch norm on scikit-learn's handwritten digits, with a DataLoader.

    python examples/digits_cnn.py --steps 200
    torchrun --nproc-per-node 2 examples/digits_cnn.py --steps 200

The loader's worker processes shift every image by up to one pixel, at random from their own seeds.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from _report import LossLog, add_report_arguments
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

HELD_OUT = 297  # of 1,797 images


class Digits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images (1, 8, 8) of digits in [0, 1] with their labels; shifted at random if `augment`."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, augment: bool) -> None:
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        if self.augment:
            down, right = torch.randint(-1, 2, (2,)).tolist()
            image = torch.roll(image, (down, right), dims=(1, 2))
        return image, self.labels[index]


def make_model(width: int) -> nn.Sequential:
    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *stage(1, width),
        *stage(width, 2 * width),
        nn.MaxPool2d(2),
        *stage(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits, device: torch.device) -> float:
    """Share of held-out digits that the model names correctly."""
    model.eval()
    right = 0
    for images, labels in DataLoader(data, batch_size=100):
        right += int((model(images.to(device)).argmax(1) == labels.to(device)).sum().item())
    model.train()
    return right / len(data)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a CNN with batch norm on handwritten digits.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=2, help="loader processes per rank")
    parser.add_argument("--persistent", action="store_true", help="keep the loader processes over epochs")
    parser.add_argument("--seed", type=int, default=0)
    add_report_arguments(parser, default_out="out/digits_cnn")
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

    pixels, classes = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(classes).long()
    train = Digits(images[:-HELD_OUT], labels[:-HELD_OUT], augment=True)
    held_out = Digits(images[-HELD_OUT:], labels[-HELD_OUT:], augment=False)
    sampler = DistributedSampler(train, world_size, rank, seed=args.seed) if world_size > 1 else None
    loader = DataLoader(
        train,
        batch_size=args.batch,
        sampler=sampler,
        shuffle=sampler is None,
        drop_last=True,
        num_workers=args.workers,
        persistent_workers=args.persistent and args.workers > 0,
        generator=torch.Generator().manual_seed(args.seed * 1000 + rank),
    )

    torch.manual_seed(args.seed)
    net = make_model(args.width).to(device)
    model: nn.Module = net
    if world_size > 1:
        model = nn.parallel.DistributedDataParallel(net, device_ids=[local_rank] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=True)

    log = LossLog(args, rank)
    log.start()
    step = epoch = 0
    while step < args.steps:
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in loader:
            loss = cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.step(loss)
            step += 1
            if step == args.steps:
                break
        epoch += 1

    log.evaluation("held-out accuracy", accuracy(net, held_out, device))
    log.finish(net)
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
