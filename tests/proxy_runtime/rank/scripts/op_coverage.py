"""torch's own samples of its operators, on the CPU and on the device, compared bit for bit.

op_coverage.py DTYPE SAMPLES [NAME ...]      prints one line per difference: operator, phase, what
"""

from __future__ import annotations

import sys
import traceback

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase  # noqa: F401  (initialises the samples' generators)
from torch.utils._pytree import tree_flatten, tree_map

torch.set_num_threads(1)
torch.autograd.set_multithreading_enabled(False)
dtype, limit, names = getattr(torch, sys.argv[1]), int(sys.argv[2]), set(sys.argv[3:])


def moved(value):
    return tree_map(lambda v: v.detach().to("cuda").requires_grad_(v.requires_grad) if torch.is_tensor(v) else v, value)


def on_cpu(value):
    return [v.detach().cpu() for v in tree_flatten(value)[0] if torch.is_tensor(v)]


def different(a, b) -> str:
    if len(a) != len(b):
        return f"{len(a)} results and {len(b)}"
    for x, y in zip(a, b, strict=True):
        if x.dtype is torch.complex32 and y.dtype is torch.complex32:  # has few operators of its own
            x, y = x.to(torch.complex64), y.to(torch.complex64)
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{x.dtype}{tuple(x.shape)} and {y.dtype}{tuple(y.shape)}"
        if not x.is_sparse and not torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)):
            x, y = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (x, y))
            return "last bits" if torch.allclose(x, y, rtol=1e-4, atol=1e-5, equal_nan=True) else "wrong"
    return ""


def call(op, sample, device: str):
    torch.manual_seed(0)
    if device == "cuda":
        return op(moved(sample.input), *moved(list(sample.args)), **moved(sample.kwargs))
    return op(sample.input, *sample.args, **sample.kwargs)


def gradients(op, sample, device: str):
    inputs = (sample.input, list(sample.args), sample.kwargs)
    if device == "cuda":
        inputs = moved(inputs)
    torch.manual_seed(0)
    out = op(inputs[0], *inputs[1], **inputs[2])
    leaves = [t for t in tree_flatten(inputs)[0] if torch.is_tensor(t) and t.requires_grad]
    outs = [o for o in tree_flatten(out)[0] if torch.is_tensor(o) and o.requires_grad]
    if not leaves or not outs:
        return []
    total = sum(o.abs().sum() if o.is_complex() else o.sum() for o in outs)
    return torch.autograd.grad(total, leaves, allow_unused=True)


def compare(op, phase: str, function, sample) -> str | None:
    try:
        wanted = function(op, sample, "cpu")
    except Exception:
        return None
    try:
        got = function(op, sample, "cuda")
    except Exception as error:
        if "-v" in sys.argv:
            traceback.print_exc()
        return f"raised {type(error).__name__}: {str(error).splitlines()[0][:160]}"
    wanted, got = ([v if v is not None else torch.zeros(0) for v in tree_flatten(r)[0]] for r in (wanted, got))
    return different(on_cpu(wanted), on_cpu(got)) or ""


def main() -> None:
    compared = 0
    for op in op_db:
        name = op.formatted_name
        if (names and name not in names) or not op.supports_dtype(dtype, "cpu"):
            continue
        # Uninitialised, indices that must be on the host, samples whose storage `moved` does not keep.
        if "empty" in name or name in ("new_empty_strided", "tensor_split", "as_strided_partial_views"):
            continue
        backward = dtype is torch.float32 and op.supports_autograd
        found: dict[tuple[str, str], None] = {}
        for n, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=backward)):
            if n >= limit:
                break
            for phase, function in (("forward", call), ("again", call), ("backward", gradients)):
                if phase == "backward" and not backward:
                    continue
                result = compare(op, phase, function, sample)
                compared += result is not None
                if result:
                    found[phase, result] = None
        for phase, result in found:
            print(f"{name}\t{phase}\t{result}", flush=True)
    from ergo_rank import _interposer

    print(f"compared {compared} refused {_interposer.channel_stats()['refused']}")


main()
