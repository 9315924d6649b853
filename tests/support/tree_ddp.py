"""Our reduction tree for native runs: what a proxied run at any rank count is compared with.

For scripts that run under ``torchrun`` on CPU with gloo. gloo's own all-reduce adds in an order of its own; with
these two, a native run has the bits that ours must have.
"""

# No `from __future__ import annotations`: DDP looks at the hook's annotations and wants the types themselves.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def tree_sum(values: list[torch.Tensor]) -> torch.Tensor:
    """Sums along the fixed tree of ``device/native/reduce_tree.hpp``: split at the largest power of two below W."""
    if len(values) == 1:
        return values[0].clone()
    half = 1 << ((len(values) - 1).bit_length() - 1)
    return tree_sum(values[:half]).add_(tree_sum(values[half:]))


def tree_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Replaces `tensor` by the sum over the group, in place, along the tree; returns it.

    Synchronous. The order is that of group ranks.
    """
    flat = tensor.detach().contiguous().view(-1)
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, flat, group=group)
    tensor.detach().copy_(tree_sum(gathered).view_as(tensor))
    return tensor


def register_tree_hook(ddp_model: DistributedDataParallel) -> None:
    """Makes DDP reduce its buckets along the tree, dividing where and how DDP does without a hook.

    Without a hook ``Reducer::mark_variable_ready_dense`` divides before the sum, gradient by gradient: it multiplies
    by 1/W while it copies a gradient into its bucket, and divides by W one that lives there already
    (``gradient_as_bucket_view`` and a gradient that was kept). These differ in the last bit where W is no power of
    two. With a hook it copies undivided, so the hook divides, each gradient in its way.
    """
    group = ddp_model.process_group
    world = dist.get_world_size(group)
    # Where each gradient was just before the reducer looked at it.
    places: dict[torch.Tensor, int] = {}

    def note(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            places[parameter] = parameter.grad.data_ptr()

    for parameter in ddp_model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(note)

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if places.pop(parameter, None) == gradient.data_ptr():
                gradient.div_(world)
            else:
                gradient.mul_(1.0 / world)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(tree_all_reduce(bucket.buffer(), group))
        return done

    register: Callable[..., None] = ddp_model.register_comm_hook
    register(None, hook)
