"""``torch.compile``: there is no code generator for a device in another process."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ergo_rank import lean

__all__ = ["install"]

_FALLBACK = "aot_eager"
_said = False


def install() -> None:
    """Makes ``inductor``, the default, run as ``aot_eager``; other backends are the caller's choice."""
    compile_ = torch.compile

    def compile(model: Any = None, *args: Any, backend: Any = "inductor", **kwargs: Any) -> Any:
        if backend == "inductor":
            backend = _FALLBACK
            # They only mean something to inductor.
            kwargs.pop("mode", None)
            kwargs.pop("options", None)
            _say_once()
        lean.load_real()
        return compile_(model, *args, backend=backend, **kwargs)

    compile.__doc__ = compile_.__doc__
    torch.compile = compile  # type: ignore[assignment]


def _say_once() -> None:
    global _said
    if not _said:
        _said = True
        print(f"ergosphere: torch.compile runs with the backend {_FALLBACK} on this device.", file=sys.stderr)
