"""Entries of module_db and optim_db."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch

from in_rank.checking import Case
from in_rank.gradients import backward, double_backward
from in_rank.moving import DEVICE, on_device, tensors
from in_rank.operators import seed_everything

_STEPS = 4


def run_module(case: Case, cap: int) -> None:
    """Forward, gradients and state of a module, in training and in evaluation."""
    info, dtype = case.task.info, getattr(torch, case.task.dtype)
    for training in (True, False):
        phase = "train" if training else "eval"
        seed_everything(0)
        inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
        for n, entry in enumerate(inputs[: cap or None]):
            if entry.forward_input is None:
                continue
            torch.manual_seed(1)
            try:
                module = info.module_cls(*entry.constructor_input.args, **entry.constructor_input.kwargs)
                module = module.to(dtype).train(training)
            except Exception:
                case.cpu_errors += 1
                continue
            given = (entry.forward_input.args, entry.forward_input.kwargs)
            uses = {phase: _used}
            if training and info.supports_gradgrad and dtype.is_floating_point:
                uses["double_backward"] = _twice_differentiated
            for name, use in uses.items():
                ours, theirs = copy.deepcopy(module), copy.deepcopy(module).to(DEVICE)
                case.check(name, n, lambda: use(ours, given), lambda: use(theirs, on_device(given)))  # noqa: B023


def _used(module: torch.nn.Module, given: Any) -> Any:
    result = module(*given[0], **given[1])
    gradients = backward(result, [list(module.parameters()), [t for t in tensors(given) if t.requires_grad]])
    return result, gradients, list(module.state_dict().values())


def _twice_differentiated(module: torch.nn.Module, given: Any) -> Any:
    def function(parameters: list[Any], given: Any) -> Any:
        return module(*given[0], **given[1])

    return double_backward(function, (list(module.parameters()), (given,), {}), lambda result: result)


def run_optimizer(case: Case, cap: int) -> None:
    """A few steps of every configuration: its parameters and its state."""
    from torch.testing._internal import common_optimizers

    info, dtype = case.task.info, getattr(torch, case.task.dtype)
    configurations = common_optimizers._get_optim_inputs_including_global_cliquey_kwargs("cpu", dtype, info)
    for n, configuration in enumerate(configurations[: cap or None]):
        case.check(
            "step",
            n,
            lambda: _as_chosen_for_cuda(info, configuration.kwargs, dtype),  # noqa: B023 (called at once)
            lambda: _stepped(info, configuration.kwargs, dtype, DEVICE),  # noqa: B023
        )


def _as_chosen_for_cuda(info: Any, options: dict[str, Any], dtype: torch.dtype) -> Any:
    """On the CPU, in the form (loop or foreach) that an optimizer chooses for CUDA tensors."""
    devices = "torch.optim.optimizer._get_foreach_kernels_supported_devices"
    with mock.patch(devices, return_value=["cpu", "cuda"]):
        return _stepped(info, options, dtype, "cpu")


def _stepped(info: Any, options: dict[str, Any], dtype: torch.dtype, device: str) -> Any:
    torch.manual_seed(5)
    parameters = [torch.nn.Parameter(torch.randn(shape, dtype=dtype).to(device)) for shape in ((3, 4), (5,))]
    if info.optim_cls.__name__ == "Muon":
        del parameters[1]  # takes matrices only
    options = {k: v.clone().to(device) if isinstance(v, torch.Tensor) and v.dim() else v for k, v in options.items()}
    optimizer = info.optim_cls(parameters, **options)
    gradients = [[torch.randn(p.shape, dtype=dtype) for p in parameters] for _ in range(_STEPS)]
    for step in gradients:

        def closure() -> torch.Tensor:
            for parameter, gradient in zip(parameters, step, strict=True):  # noqa: B023 (called at once)
                parameter.grad = gradient.to(device) + 0.1 * parameter.detach()
            return torch.stack([(p.detach() ** 2).sum() for p in parameters]).sum()

        closure()
        optimizer.step(closure)
    state = [t.cpu() for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    # Steps are counted on the host by some optimizers.
    return [p.detach() for p in parameters], [t.to(device) for t in state]
