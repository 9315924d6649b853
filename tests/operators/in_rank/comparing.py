"""Two results, bit for bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten

# How far results of another kernel may be apart, in units of the dtype's precision at the largest value.
_TOLERANCE = 64


class Difference(NamedTuple):
    """What differs: `kind` is one of those in docs/operators.md."""

    kind: str
    text: str


def difference(wanted: Any, got: Any, *, contents: bool = True, device: str = "cuda") -> Difference | None:
    """How `got` differs from `wanted`, from the CPU; None if no bit does.

    Args:
        device: where `got` must be.
        contents: False for results whose contents are arbitrary, as those of ``empty``.
    """
    ours, theirs = tree_flatten(got)[0], tree_flatten(wanted)[0]
    if len(ours) != len(theirs):
        return Difference("wrong", f"{len(ours)} results instead of {len(theirs)}")
    note = None
    for n, (x, y) in enumerate(zip(theirs, ours, strict=True)):
        found = _one(x, y, contents, device) if isinstance(x, torch.Tensor) else _plain(x, y)
        if found and found.kind not in ("strides", "device"):
            return Difference(found.kind, f"result {n}: {found.text}")
        note = note or found
    return note


def _plain(x: Any, y: Any) -> Difference | None:
    if isinstance(x, (torch.device, torch.Generator)):
        return None
    if type(x) is not type(y) or (x != y and x == x):
        return Difference("wrong", f"{y!r} instead of {x!r}")
    return None


def _one(x: torch.Tensor, y: Any, contents: bool, device: str) -> Difference | None:
    if not isinstance(y, torch.Tensor):
        return Difference("wrong", f"no tensor but {y!r}")
    for what in ("layout", "dtype", "shape"):
        if getattr(x, what) != getattr(y, what):
            return Difference("metadata", f"{what} {getattr(y, what)} instead of {getattr(x, what)}")
    note = None
    if x.layout == torch.strided and x.numel() > 1 and x.stride() != y.stride():
        note = Difference("strides", f"{y.stride()} instead of {x.stride()}")
    if x.device.type != "meta" and y.device.type != device:
        note = Difference("device", f"on {y.device}")
    if not contents or x.device.type == "meta":
        return note
    for part, other in zip(_parts(x), _parts(y), strict=True):
        if found := _bits(part, other):
            return found
    return note


def _parts(t: torch.Tensor) -> list[torch.Tensor]:
    """The strided CPU tensors that hold the contents of `t`."""
    t = t.detach()
    if t.layout == torch.sparse_coo:
        parts = [t._indices(), t._values()]
    elif t.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [t.crow_indices(), t.col_indices(), t.values()]
    elif t.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [t.ccol_indices(), t.row_indices(), t.values()]
    elif t.is_quantized:
        parts = [t.cpu().int_repr()]
    else:
        parts = [t]
    return [torch.empty(p.shape, dtype=p.dtype).copy_(p.cpu()) for p in parts]


def _bits(x: torch.Tensor, y: torch.Tensor) -> Difference | None:
    if x.shape != y.shape or x.dtype != y.dtype:
        return Difference("metadata", f"component {y.dtype}{tuple(y.shape)} instead of {x.dtype}{tuple(x.shape)}")
    if torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)):
        return None
    if not (x.is_floating_point() or x.is_complex()):
        return Difference("wrong", f"{int((x != y).sum())} of {x.numel()} {x.dtype} differ")
    precision = torch.finfo(x.dtype).eps
    wide = torch.complex128 if x.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    nan, ours = x.isnan(), y.isnan()
    if torch.equal(nan, ours):
        x, y = _without_nan(x), _without_nan(y)  # a NaN is a NaN, whatever its payload
    elif not (ours & ~nan).any() and torch.equal(x[~nan], y[~nan]):
        return Difference("cpu_nan", f"{int(nan.sum())} of {x.numel()} are NaN on the CPU, {int(ours.sum())} here")
    if torch.equal(x, y):
        signs = [torch.signbit(torch.view_as_real(t) if t.is_complex() else t) for t in (x, y)]
        return None if torch.equal(*signs) else Difference("tolerance", "zeros of different signs")
    finite = x[torch.isfinite(x)].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    near = torch.allclose(x, y, rtol=_TOLERANCE * precision, atol=_TOLERANCE * precision * scale, equal_nan=True)
    apart = (x - y).abs().nan_to_num(0, 0, 0)
    text = f"{int((apart != 0).sum())} of {x.numel()} differ, by {float(apart.max()):.1e} at most"
    return Difference("tolerance" if near else "wrong", text)


def _without_nan(t: torch.Tensor) -> torch.Tensor:
    return torch.where(t.isnan(), torch.zeros_like(t), t)
