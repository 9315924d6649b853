"""Our reduction tree under a native run's own collectives: gloo moves the bytes, the sums follow the tree.

For scripts that run natively on the CPU at more than two ranks, where gloo adds in an order of its own. Replaces
the CPU kernels of the operators behind ``dist.all_reduce``, ``reduce``, ``reduce_scatter`` and their variants; what
uses them (DDP without a hook, FSDP, DTensor, functional collectives) needs no change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_Tensors = list[torch.Tensor]
_kept: list[torch.library.Library] = []


def _combine(op: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    kinds: Any = dist.ReduceOp.RedOpType
    return {
        kinds.SUM: torch.Tensor.add_,
        kinds.AVG: torch.Tensor.add_,
        kinds.PRODUCT: torch.Tensor.mul_,
        kinds.MIN: lambda a, b: torch.minimum(a, b, out=a),
        kinds.MAX: lambda a, b: torch.maximum(a, b, out=a),
        kinds.BAND: torch.Tensor.bitwise_and_,
        kinds.BOR: torch.Tensor.bitwise_or_,
        kinds.BXOR: torch.Tensor.bitwise_xor_,
    }[op]


def tree_reduce(values: _Tensors, op: Any) -> torch.Tensor:
    """Reduces along the fixed tree of ``device/native/reduce_tree.hpp``; `values` stay as they are."""

    def walk(part: _Tensors) -> torch.Tensor:
        if len(part) == 1:
            return part[0].clone()
        half = 1 << ((len(part) - 1).bit_length() - 1)
        return _combine(op)(walk(part[:half]), walk(part[half:]))

    total = walk(values)
    kinds: Any = dist.ReduceOp.RedOpType
    if op == kinds.AVG:
        total = total.div_(len(values)) if total.is_floating_point() or total.is_complex() else total // len(values)
    return total


def install() -> None:
    """Replaces the kernels, for the life of the process."""
    library = torch.library.Library("c10d", "IMPL")
    for name, kernel in {
        "allreduce_": _all_reduce,
        "allreduce_coalesced_": _all_reduce_coalesced,
        "reduce_": _reduce,
        "reduce_scatter_": _reduce_scatter,
        "_reduce_scatter_base_": _reduce_scatter_base,
        "reduce_scatter_tensor_coalesced_": _reduce_scatter_coalesced,
    }.items():
        library.impl(name, kernel, "CPU")
    _kept.append(library)


def _group(boxed: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(boxed)


def _op(boxed: Any) -> Any:
    return dist.ReduceOp.unbox(boxed).op if hasattr(dist.ReduceOp, "unbox") else boxed.op()


def _gather(group: dist.ProcessGroup, tensor: torch.Tensor) -> _Tensors:
    mine = tensor.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([parts], [mine]).wait()
    return parts


def _done(group: dist.ProcessGroup) -> Any:
    return group.barrier().boxed()


def _all_reduce(tensors: _Tensors, group: Any, op: Any, *_: Any) -> Any:
    pg = _group(group)
    for tensor in tensors:
        tensor.detach().copy_(tree_reduce(_gather(pg, tensor), _op(op)))
    return tensors, _done(pg)


def _all_reduce_coalesced(tensors: _Tensors, group: Any, op: Any, *_: Any) -> Any:
    return _all_reduce(tensors, group, op)[1]


def _reduce(tensors: _Tensors, group: Any, op: Any, root: int, *_: Any) -> Any:
    pg = _group(group)
    for tensor in tensors:
        parts = _gather(pg, tensor)
        if pg.rank() == root:
            tensor.detach().copy_(tree_reduce(parts, _op(op)))
    return _done(pg)


def _reduce_scatter(outputs: _Tensors, inputs: list[_Tensors], group: Any, op: Any, *_: Any) -> Any:
    pg = _group(group)
    for output, blocks in zip(outputs, inputs, strict=True):
        for block, tensor in enumerate(blocks):
            parts = _gather(pg, tensor)
            if block == pg.rank():
                output.detach().copy_(tree_reduce(parts, _op(op)))
    return outputs, _done(pg)


def _reduce_scatter_base(output: torch.Tensor, input: torch.Tensor, group: Any, op: Any, *_: Any) -> Any:
    pg = _group(group)
    parts = [part.view(-1).chunk(pg.size())[pg.rank()] for part in _gather(pg, input)] if input.numel() else []
    if parts:
        output.detach().copy_(tree_reduce(parts, _op(op)).view_as(output))
    return output, _done(pg)


def _reduce_scatter_coalesced(outputs: _Tensors, inputs: _Tensors, group: Any, op: Any, *_: Any) -> Any:
    pg = _group(group)
    for output, tensor in zip(outputs, inputs, strict=True):
        _reduce_scatter_base(output, tensor, group, op)
    return _done(pg)
