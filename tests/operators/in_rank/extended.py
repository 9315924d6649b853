"""The phases of an operator that scripts meet seldom."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from in_rank.checking import FAILED, Case
from in_rank.gradients import Arguments, backward, call, double_backward, tangents
from in_rank.moving import tensors
from in_rank.operators import arguments, differentiable, first, move, moved, needs_no_device, seed_everything, write_out

_FEW = 6
_MOST_ERRORS = 60
_MOST_SPARSE = 10
_LAYOUTS = {
    "coo": torch.sparse_coo,
    "csr": torch.sparse_csr,
    "csc": torch.sparse_csc,
    "bsr": torch.sparse_bsr,
    "bsc": torch.sparse_bsc,
}


def run(case: Case, cap: int) -> None:
    """Reference inputs, other memory layouts, second and forward derivatives, errors."""
    info, dtype = case.task.info, getattr(torch, case.task.dtype)
    if case.task.table == "op":
        seed_everything(0)
        for n, sample in enumerate(first(info.reference_inputs("cpu", dtype), cap)):
            _same(case, "reference", n, arguments(sample), info.op)
    seed_everything(0)
    wants_gradients = differentiable(case)
    for n, sample in enumerate(first(info.sample_inputs("cpu", dtype, requires_grad=wants_gradients), cap)):
        _derivatives(case, n, sample, wants_gradients)
        _other_forms(case, n, sample)
    if case.task.table == "op":
        for name, layout in _LAYOUTS.items():
            _sparse(case, name, layout, cap)
        if info.error_inputs_func is not None and case.task.dtype == "float32":
            _errors(case)


def _same(case: Case, phase: str, n: int, ours: Arguments, function: Any) -> None:
    if not needs_no_device(ours):
        _compare(case, phase, n, ours, lambda a: call(function, a))


def _derivatives(case: Case, n: int, sample: Any, wants_gradients: bool) -> None:
    info, ours = case.task.info, arguments(sample)
    process = sample.output_process_fn_grad
    if not wants_gradients:
        return
    phases = []
    if info.supports_gradgrad:
        phases.append(("double_backward", lambda a: double_backward(info.op, a, process)))
    if info.supports_forward_ad and n < _FEW:
        phases.append(("forward_ad", lambda a: tangents(info.op, a)))
    for phase, derive in phases:
        _compare(case, phase, n, ours, derive)


def _compare(case: Case, phase: str, n: int, ours: Arguments, function: Callable[[Arguments], Any]) -> None:
    theirs = move(case, phase, n, ours)
    if theirs is not FAILED:
        case.compare(phase, n, function, ours, theirs)


def _other_forms(case: Case, n: int, sample: Any) -> None:
    info = case.task.info
    try:
        strided = arguments(sample.noncontiguous())
    except Exception:
        strided = None  # not every sample has such a form
    if strided is not None:
        _same(case, "noncontiguous", n, strided, info.op)
    if info.method_variant is not None and n < _FEW:
        _same(case, "method", n, arguments(sample), info.method_variant)
    if info.supports_out and n < _FEW:
        ours = arguments(sample)
        try:
            like = call(info.op, ours)
        except Exception:
            return
        theirs = moved(case, ours)
        write_out(case, "out_strided", n, ours, theirs, like, _with_gaps)
        write_out(case, "out_resized", n, ours, theirs, like, _of_another_shape)


def _with_gaps(t: torch.Tensor, device: str) -> torch.Tensor:
    return torch.zeros((*t.shape, 2), dtype=t.dtype, device=device)[..., 0]


def _of_another_shape(t: torch.Tensor, device: str) -> torch.Tensor:
    return torch.zeros((3,) if t.dim() != 1 else (2, 3), dtype=t.dtype, device=device)


def _sparse(case: Case, name: str, layout: torch.layout, cap: int) -> None:
    info = case.task.info
    if not info.supports_sparse_layout(layout):
        return
    seed_everything(0)
    wants_gradients = differentiable(case)

    def with_gradients(a: Arguments, process: Any) -> Any:
        result = call(info.op, a)
        if not wants_gradients:
            return result
        try:
            return result, backward(result, a, process)
        except Exception:
            # Many have no backward of this layout, on the CPU either.
            return result, []

    for n, sample in enumerate(_sparse_samples(case, name, layout, cap, wants_gradients)):
        process = sample.output_process_fn_grad
        _compare(case, f"sparse_{name}", n, arguments(sample), partial(with_gradients, process=process))


def _sparse_samples(case: Case, name: str, layout: torch.layout, cap: int, wants_gradients: bool) -> list[Any]:
    """The entry's own samples of a layout; of unary operators, which have none, the dense ones in that layout."""
    info, dtype = case.task.info, getattr(torch, case.task.dtype)
    try:
        return list(first(info.sample_inputs_sparse(layout, "cpu", dtype, requires_grad=wants_gradients), cap))
    except Exception:
        pass
    samples = []
    for sample in first(info.sample_inputs("cpu", dtype), cap or _MOST_SPARSE):
        if not isinstance(sample.input, torch.Tensor) or sample.input.dim() < 2 or sample.args:
            continue
        blocks = {"blocksize": (1, 1)} if name in ("bsr", "bsc") else {}
        try:
            sample.input = sample.input.detach().to_sparse(layout=layout, **blocks).requires_grad_(wants_gradients)
        except Exception:
            continue  # has no such form
        samples.append(sample)
    return samples


def _errors(case: Case) -> None:
    """What raises on the CPU raises the same here, by type and text."""
    info = case.task.info

    def raised(a: Arguments) -> Exception | None:
        torch.manual_seed(3)
        try:
            call(info.op, a)
            torch.cuda.synchronize()
        except Exception as error:
            return error
        return None

    for n, entry in enumerate(first(info.error_inputs("cpu"), _MOST_ERRORS)):
        ours = arguments(entry.sample_input)
        if any(t.device.type != "cpu" for t in tensors(ours)):
            continue  # about a mixture of devices
        case.say("errors", n)
        wanted = raised(ours)
        if wanted is None:
            continue
        try:
            theirs = moved(case, ours)
        except Exception:
            continue  # what cannot be moved is not the operator's error
        case.counts["errors"] += 1
        got = raised(theirs)
        what = f"{type(wanted).__name__}: {wanted}"[:160]
        if got is None:
            case.fail("errors", "no_error", what, n)
        elif type(got) is not type(wanted):
            case.fail("errors", "error_type", f"{type(got).__name__}: {got}"[:200] + " instead of " + what, n)
        elif _plain(wanted) not in _plain(got):
            case.fail("errors", "error_text", f"{got}"[:200] + " instead of " + what, n)


def _plain(error: Exception) -> str:
    return str(error).strip().replace("cuda:0", "cpu").replace("cuda", "cpu").replace("CUDA", "CPU")
