"""What every script here prints: each loss to the last bit, and a hash of the final weights."""

import hashlib

import torch


def loss(value: torch.Tensor | float) -> None:
    print("loss", float(value.detach() if isinstance(value, torch.Tensor) else value).hex(), flush=True)


def tensor(name: str, value: torch.Tensor) -> None:
    data = value.detach().cpu().contiguous()
    print(name, tuple(data.shape), hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest(), flush=True)


def weights(*modules: torch.nn.Module) -> None:
    digest = hashlib.sha256()
    for module in modules:
        for name, value in sorted(module.state_dict().items()):
            data = value.detach().cpu().contiguous()
            digest.update(name.encode())
            digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    print("weights", digest.hexdigest(), flush=True)
