"""Copies between host and accelerator, and one memcpy of the same size; see `_serving.py`."""

from __future__ import annotations

import time
from typing import Any

import torch
from _serving import serve

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    torch.set_num_threads(1)
    device: dict[int, torch.Tensor] = {}
    host: dict[tuple[int, str], torch.Tensor] = {}

    def make(size: int) -> dict[str, Any]:
        device[size] = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
        for kind in ("pageable", "pinned", "other"):
            host[size, kind] = torch.ones(size, dtype=torch.uint8, pin_memory=kind == "pinned" and DEVICE == "cuda")
        return {}

    def timed(what: str, kind: str, size: int, count: int) -> dict[str, Any]:
        there, here = device[size], host[size, kind]
        source, target = {"h2d": (here, there), "d2h": (there, here), "memcpy": (here, host[size, "other"])}[what]
        began = time.perf_counter()
        for _ in range(count):
            target.copy_(source)
        there[:1].cpu()
        return {"seconds": time.perf_counter() - began}

    def right(size: int, kind: str) -> dict[str, Any]:
        """Whether what went there comes back."""
        pattern = torch.randint(256, (size,), dtype=torch.uint8)
        host[size, kind].copy_(pattern)
        device[size].copy_(host[size, kind])
        host[size, kind].zero_()
        host[size, kind].copy_(device[size])
        return {"equal": torch.equal(host[size, kind], pattern)}

    serve({"make": make, "timed": timed, "right": right})


main()
