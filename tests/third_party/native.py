"""Runs a script without Ergosphere on the device that the proxy computes on, the CPU.

    python native.py SCRIPT [ARGUMENTS]

The script finds no CUDA and takes its own CPU path. One thing is added, because one generator serves host and device
there and a rank has two: draws that a model makes (dropout, noise like a tensor, permutations; loaders have generators
of their own) come from a second generator, seeded as the first. Draws for weights and data, which the scripts make on
the host, come from the first.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_ON_DEVICE = {
    _aten.bernoulli_.float, _aten.bernoulli.p, _aten.native_dropout.default, _aten.rand_like.default,
    _aten.randn_like.default, _aten.randperm.default, _aten._scaled_dot_product_flash_attention_for_cpu.default,
}  # fmt: skip


class SecondGenerator(TorchDispatchMode):
    """Holds the state of the device's generator while the host's is in use, and swaps them for a draw."""

    def __init__(self) -> None:
        super().__init__()
        self._seed = torch.manual_seed
        self._default = torch.default_generator
        self._state = torch.Generator().manual_seed(self._default.initial_seed()).get_state()
        torch.manual_seed = self._seed_both  # type: ignore[assignment]
        torch.random.manual_seed = self._seed_both  # type: ignore[assignment]

    def _seed_both(self, seed: int) -> torch.Generator:
        self._state = torch.Generator().manual_seed(int(seed)).get_state()
        return self._seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _ON_DEVICE:
            return func(*args, **(kwargs or {}))
        host = self._default.get_state()
        self._default.set_state(self._state)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._state = self._default.get_state()
            self._default.set_state(host)


def main() -> None:
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    torch.set_num_threads(1)
    with SecondGenerator():
        runpy.run_path(script, run_name="__main__")


main()
