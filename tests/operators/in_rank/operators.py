"""Entries of op_db and foreach_op_db, in the phases that training meets."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_flatten, tree_map

from in_rank.checking import FAILED, Case, kind_of
from in_rank.gradients import Arguments, backward, call
from in_rank.moving import DEVICE, clones, on_device

# Both are cheap to compare and seldom differ from sample to sample.
_WRITING_SAMPLES = 8
_HALVES = (torch.float16, torch.bfloat16)
# Operators whose further arguments must be CPU tensors also for a CUDA tensor.
_HOST_ARGUMENTS = {"tensor_split"}


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def arguments(sample: Any) -> Arguments:
    """What a sample calls its operator with.

    Some samples are views of a leaf that were made without gradients; torch forgets theirs on any device.
    """

    def own(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf and value._is_view():
            return value.detach().requires_grad_()
        return value

    return tree_map(own, (sample.input, sample.args, sample.kwargs))


def first(samples: Iterable[Any], cap: int) -> Iterator[Any]:
    return islice(samples, cap or None)


def needs_no_device(a: Arguments) -> bool:
    """Whether these are numbers only: the result is the host's then."""
    leaves = tree_flatten(a)[0]
    return not any(isinstance(v, (torch.Tensor, torch.device)) or v == "cpu" for v in leaves)


def moved(case: Case, ours: Arguments) -> Arguments:
    """`ours` on the device, but for what the operator wants on the host there too."""
    if case.task.name in _HOST_ARGUMENTS:
        return on_device(ours[0]), *ours[1:]
    return on_device(ours)


def differentiable(case: Case) -> bool:
    info, dtype = case.task.info, getattr(torch, case.task.dtype)
    return bool(info.supports_autograd) and dtype in info.supported_backward_dtypes("cpu")


def run(case: Case, cap: int) -> None:
    """Phases forward, backward, inplace and out, hit: the same templates with other values, and numbers."""
    info, dtype = case.task.info, getattr(torch, case.task.dtype)
    seed_everything(0)
    wants_gradients = differentiable(case)
    for n, sample in enumerate(first(info.sample_inputs("cpu", dtype, requires_grad=wants_gradients), cap)):
        _fresh(case, n, sample, wants_gradients)
    seed_everything(1)
    for n, sample in enumerate(first(info.sample_inputs("cpu", dtype), cap)):
        _again(case, n, arguments(sample))
    seed_everything(2)
    samples = info.sample_inputs("cpu", dtype, requires_grad=wants_gradients)
    few = first(samples, 4 * cap)  # most entries have no such argument in any sample
    for n, changed in enumerate(first(filter(None, (_other_numbers(arguments(s)) for s in few)), cap)):
        _with_gradients(case, n, changed)


def _fresh(case: Case, n: int, sample: Any, wants_gradients: bool) -> None:
    info, ours = case.task.info, arguments(sample)
    theirs = move(case, "forward", n, ours)
    if theirs is FAILED or needs_no_device(ours):
        return
    wanted, got = case.compare("forward", n, lambda a: call(info.op, a), ours, theirs)
    if got is FAILED:
        return
    if n < _WRITING_SAMPLES:
        inplace(case, sample, n)
        if info.supports_out:
            _empty_out(case, n, ours, theirs, wanted)
    if wants_gradients:
        process = sample.output_process_fn_grad
        case.check("backward", n, lambda: backward(wanted, ours, process), lambda: backward(got, theirs, process))


def _again(case: Case, n: int, ours: Arguments) -> None:
    theirs = move(case, "hit", n, ours)
    if theirs is not FAILED and not needs_no_device(ours):
        case.compare("hit", n, lambda a: call(case.task.info.op, a), ours, theirs)


def _other_numbers(a: Arguments) -> Arguments | None:
    """`a` with other numbers, and a `dtype` wider than half precision; None if there is nothing to change.

    Most samples have 0, 0.5, 1 or 2, with which every way to compute rounds alike, and ask for float64.
    """
    changed = False

    def other(value: Any) -> Any:
        nonlocal changed
        if type(value) is float and math.isfinite(value):
            changed = True
            return value * 0.9 + 0.0371
        if value is torch.float64 and isinstance(a[0], torch.Tensor) and a[0].dtype in _HALVES:
            changed = True
            return torch.float32
        return value

    others = (a[0], tree_map(other, a[1]), tree_map(other, a[2]))
    return others if changed else None


def _with_gradients(case: Case, n: int, ours: Arguments) -> None:
    def both(a: Arguments) -> Any:
        result = call(case.task.info.op, a)
        return result, backward(result, a)

    theirs = move(case, "numbers", n, ours)
    if theirs is not FAILED and not needs_no_device(ours):
        case.compare("numbers", n, both, ours, theirs)


def move(case: Case, phase: str, n: int, ours: Arguments) -> Any:
    """`ours` on the device, or `FAILED`. Before the call: some operators write what they only seem to read."""
    case.say("move", n)
    try:
        return moved(case, ours)
    except Exception as error:
        case.fail(phase, kind_of(error), f"moving the sample: {type(error).__name__}: {error}", n)
        return FAILED


def inplace(case: Case, sample: Any, n: int) -> None:
    function = case.task.info.inplace_variant
    if function is None or sample.broadcasts_input:
        return
    ours = clones(arguments(sample))
    theirs = moved(case, ours)

    def both(a: Arguments) -> Any:
        return call(function, a), a[0]

    case.check("inplace", n, lambda: both(ours), lambda: both(theirs))


def _empty_out(case: Case, n: int, ours: Arguments, theirs: Arguments, like: Any) -> None:
    write_out(case, "out", n, ours, theirs, like, lambda t, device: torch.empty(0, dtype=t.dtype, device=device))


def write_out(
    case: Case,
    phase: str,
    n: int,
    ours: Arguments,
    theirs: Arguments,
    like: Any,
    make: Callable[[torch.Tensor, str], torch.Tensor],
) -> None:
    """``out=`` of tensors that `make` makes for the result `like`."""

    def written(a: Arguments, device: str) -> Any:
        out = tree_map(lambda t: make(t, device) if isinstance(t, torch.Tensor) else t, like)
        out = tuple(out) if isinstance(out, tuple) else out
        a = clones(a)
        case.task.info.op(a[0], *a[1], out=out, **a[2])
        return out

    case.check(phase, n, lambda: written(ours, "cpu"), lambda: written(theirs, DEVICE))
