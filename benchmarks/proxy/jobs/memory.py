"""What a rank holds after its first device operation, and with much allocated on the device; see `_serving.py`."""

from __future__ import annotations

import torch
from _serving import serve

held: list[torch.Tensor] = []


def first() -> dict[str, int]:
    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    return memory()


def allocate(size: int) -> dict[str, int]:
    held.append(torch.ones(size, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    return memory()


def memory() -> dict[str, int]:
    found = {"Rss": 0, "Private": 0}
    with open("/proc/self/smaps_rollup") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            key = name.partition("_")[0]
            if key in found and not name.endswith("Hugetlb"):
                found[key] += int(rest.split()[0]) * 1024
    return found


serve({"first": first, "allocate": allocate})
