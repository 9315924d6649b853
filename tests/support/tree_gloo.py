"""Our reduction tree under a native run's own collectives: gloo moves the bytes, the sums follow the tree.

For scripts that run natively on the CPU at more than two ranks, where gloo adds in an order of its own. Replaces
the CPU kernels of the operators behind ``dist.all_reduce``, ``reduce``, ``reduce_scatter`` and their variants; what
uses them (DDP without a hook, FSDP, DTensor, functional collectives) needs no change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

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
        whole = not (total.is_floating_point() or total.is_complex())
        total = total.div_(len(values), rounding_mode="trunc" if whole else None)
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


class _Gather:
    """One tensor of every member, asked for when the call is made, so that a group's calls keep their order."""

    def __init__(self, group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
        mine = tensor.detach().contiguous()
        self._parts = [torch.empty_like(mine) for _ in range(group.size())]
        self._work = group.allgather([self._parts], [mine])

    def parts(self) -> _Tensors:
        self._work.wait()
        return self._parts


def _later(run: Callable[[], None], results: _Tensors) -> Any:
    """The handle of what a thread does meanwhile: a call never waits.

    A thread of its own for each, since what is chained to the future runs in it and may make the group's next call.
    """
    future: torch.futures.Future[_Tensors] = torch.futures.Future()

    def job() -> None:
        try:
            with torch.no_grad():
                run()
            future.set_result(results)
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=job, daemon=True).start()
    return _create_work_from_future(future).boxed()


def _all_reduce(tensors: _Tensors, group: Any, op: Any, *_: Any) -> Any:
    pg, kind = _group(group), _op(op)
    gathers = [_Gather(pg, tensor) for tensor in tensors]

    def run() -> None:
        for tensor, gather in zip(tensors, gathers, strict=True):
            tensor.detach().copy_(tree_reduce(gather.parts(), kind))

    return tensors, _later(run, tensors)


def _all_reduce_coalesced(tensors: _Tensors, group: Any, op: Any, *_: Any) -> Any:
    return _all_reduce(tensors, group, op)[1]


def _reduce(tensors: _Tensors, group: Any, op: Any, root: int, *_: Any) -> Any:
    pg, kind = _group(group), _op(op)
    gathers = [_Gather(pg, tensor) for tensor in tensors]

    def run() -> None:
        for tensor, gather in zip(tensors, gathers, strict=True):
            parts = gather.parts()
            if pg.rank() == root:
                tensor.detach().copy_(tree_reduce(parts, kind))

    return _later(run, tensors)


def _reduce_scatter(outputs: _Tensors, inputs: list[_Tensors], group: Any, op: Any, *_: Any) -> Any:
    pg, kind = _group(group), _op(op)
    gathers = [[_Gather(pg, block) for block in blocks] for blocks in inputs]

    def run() -> None:
        for output, blocks in zip(outputs, gathers, strict=True):
            parts = [gather.parts() for gather in blocks]
            output.detach().copy_(tree_reduce(parts[pg.rank()], kind))

    return outputs, _later(run, outputs)


def _scatter_into(outputs: _Tensors, inputs: _Tensors, group: Any, op: Any) -> Any:
    pg, kind = _group(group), _op(op)
    gathers = [_Gather(pg, tensor) for tensor in inputs]

    def run() -> None:
        for output, gather in zip(outputs, gathers, strict=True):
            parts = [part.view(pg.size(), -1)[pg.rank()] for part in gather.parts()]
            output.detach().copy_(tree_reduce(parts, kind).view_as(output))

    return _later(run, outputs)


def _reduce_scatter_base(output: torch.Tensor, input: torch.Tensor, group: Any, op: Any, *_: Any) -> Any:
    if not input.numel():
        return output, _later(lambda: None, [output])
    return output, _scatter_into([output], [input], group, op)


def _reduce_scatter_coalesced(outputs: _Tensors, inputs: _Tensors, group: Any, op: Any, *_: Any) -> Any:
    return _scatter_into(outputs, inputs, group, op)
