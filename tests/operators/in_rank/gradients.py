"""Gradients of an operator's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

from in_rank.moving import tensors

Arguments = tuple[Any, Any, Any]


def call(function: Callable[..., Any], a: Arguments) -> Any:
    return function(a[0], *a[1], **a[2])


def _differentiable(result: Any, process: Callable[[Any], Any]) -> list[torch.Tensor]:
    try:
        result = process(result)
    except Exception:
        pass  # made for another kind of result
    return [t for t in tensors(result) if t.requires_grad and (t.is_floating_point() or t.is_complex())]


def _cotangent(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    dtype = torch.complex64 if t.dtype == torch.complex32 else t.dtype
    return torch.randn(t.shape, generator=generator, dtype=dtype).to(t.dtype).to(t.device)


def backward(result: Any, arguments: Any, process: Callable[[Any], Any] = lambda r: r) -> list[torch.Tensor | None]:
    """Gradients of `arguments` for random gradients of `result`."""
    outputs = _differentiable(result, process)
    inputs = [t for t in tensors(arguments) if t.requires_grad]
    if not outputs or not inputs:
        return []
    generator = torch.Generator().manual_seed(7)
    cotangents = [_cotangent(t, generator) for t in outputs]
    return list(torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True))


def double_backward(function: Callable[..., Any], a: Arguments, process: Callable[[Any], Any]) -> list[Any]:
    outputs = _differentiable(call(function, a), process)
    inputs = [t for t in tensors(a) if t.requires_grad]
    if not outputs or not inputs:
        return []
    halves = [torch.full_like(t, 0.5) for t in outputs]
    first = torch.autograd.grad(outputs, inputs, halves, create_graph=True, allow_unused=True)
    again = [t for t in first if t is not None and t.requires_grad]
    if not again:
        return []
    return list(torch.autograd.grad(again, inputs, [torch.ones_like(t) for t in again], allow_unused=True))


def tangents(function: Callable[..., Any], a: Arguments) -> list[torch.Tensor | None]:
    """Forward-mode derivatives in the direction of ones."""

    def dual(t: Any) -> Any:
        if isinstance(t, torch.Tensor) and t.requires_grad:
            return forward_ad.make_dual(t.detach(), torch.ones_like(t))
        return t

    with forward_ad.dual_level():
        results = tensors(call(function, tree_map(dual, a)))
        return [forward_ad.unpack_dual(t).tangent for t in results if t.is_floating_point() or t.is_complex()]
