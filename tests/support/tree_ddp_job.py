"""A small DDP training for test_tree_ddp.py: prints a hash of all parameters after some steps.

Usage: tree_ddp_job.py RANK WORLD RENDEZVOUS_FILE {default,tree} {view,copy} {none,zero} {all,one}
"""

from __future__ import annotations

import hashlib
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.tree_ddp import register_tree_hook


def main() -> None:
    """Trains with or without the hook."""
    rank, world, file, reduction, layout, clearing, active = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=int(rank), world_size=int(world))
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(70, 70), torch.nn.Tanh()) for _ in range(4)))
    # Buckets of 20 kB: several of them.
    model = DistributedDataParallel(net, gradient_as_bucket_view=layout == "view", bucket_cap_mb=0.02)
    if reduction == "tree":
        register_tree_hook(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(100 + int(rank))
    # "one": all gradients but rank 0's are exactly zero, so that sums have one order only.
    weight = 1.0 if active == "all" or rank == "0" else 0.0
    for step in range(6):
        data = torch.randn(16, 70)
        if step == 3:  # accumulation: gradients that exist already when the reducer looks at them
            with model.no_sync():
                (model(data).square().sum() * weight).backward()
        (model(data).square().sum() * weight).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=clearing == "none")
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(digest.hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
