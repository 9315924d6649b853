"""Runs a script as it is, and writes down what its rank has computed when it ends.

    python observed.py SCRIPT [ARGUMENTS]

Imports nothing of ours: it looks at the script through torch's own hooks. ``observed-rank{r}.json`` in the current
directory has every loss (what `backward` was called on) with its exact value, and sha256 digests of all modules'
parameters and buffers, of every optimizer's `state_dict`, and of the generators of host and device.

``OBSERVED_GATES`` (``5:/path``, joined by commas): after so many optimizer steps wait for that file to be there.
``OBSERVED_PAUSE``: seconds for which each step stops, by turns before `backward`, after it, and at the step's end, so
that who cuts a script of short steps finds it in the midst of one.
"""

import gc
import hashlib
import json
import os
import random
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

losses: list[torch.Tensor] = []
optimizers: list[torch.optim.Optimizer] = []
modules: dict[int, torch.nn.Module] = {}
gates = dict(gate.split(":", 1) for gate in os.environ.get("OBSERVED_GATES", "").split(",") if gate)
pause = float(os.environ.get("OBSERVED_PAUSE", "0"))
steps = 0
_backward = torch.autograd.backward


def backward(tensors: Any, *arguments: Any, **named: Any) -> None:
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)  # or edges of the graph
    losses.extend(root.detach() for root in roots if isinstance(root, torch.Tensor) and root.numel() == 1)
    rest(0)
    _backward(tensors, *arguments, **named)
    rest(1)


def rest(place: int) -> None:
    if pause and steps % 3 == place:
        time.sleep(pause)


def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """What an optimizer trains is there when it makes its first step; a script's `main` lets go of it at its end."""
    if not any(optimizer is known for known in optimizers):
        optimizers.append(optimizer)
        modules.update({id(each): each for each in gc.get_objects() if isinstance(each, torch.nn.Module)})
    global steps
    rest(2)
    steps += 1
    while str(steps) in gates and not os.path.exists(gates[str(steps)]):
        time.sleep(0.005)


def flat(value: Any, path: str = "") -> Iterator[tuple[str, bytes]]:
    """Every number of a nested value with its place, in the order of the places' names."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from flat(value[key], f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from flat(each, f"{path}/{index}")
    elif isinstance(value, torch.Tensor):
        local: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value  # pyright: ignore
        here = local.detach().cpu().contiguous().reshape(-1)
        yield f"{path} {local.dtype} {list(local.shape)}", here.view(torch.uint8).numpy().tobytes()
    else:
        yield path, repr(value.hex() if isinstance(value, float) else value).encode()


def digest(value: Any) -> str:
    found = hashlib.sha256()
    for path, content in flat(value):
        found.update(f"{path} {len(content)}\n".encode() + content)
    return found.hexdigest()


def weights() -> list[str]:
    """A digest for each module that is no part of another, in the order of their digests."""
    parts = {id(child) for each in modules.values() for child in each.modules() if child is not each}
    return sorted(
        digest({**dict(each.named_parameters()), **dict(each.named_buffers())})
        for key, each in modules.items()
        if key not in parts
    )


def generators() -> dict[str, str]:
    state: Any = numpy.random.get_state(legacy=False)
    return {
        "host": digest(torch.get_rng_state()),
        "device": digest(torch.cuda.get_rng_state()),
        "python": digest(random.getstate()),
        "numpy": digest({**state, "state": {name: str(each) for name, each in state["state"].items()}}),
    }


def main() -> None:
    random.seed(0)  # or they begin with what the system draws, and two runs have nothing in common
    numpy.random.seed(0)
    torch.autograd.backward = backward
    register_optimizer_step_post_hook(stepped)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    found = {
        "losses": [float(loss.double().item()).hex() for loss in losses],
        "weights": weights(),
        "optimizers": [digest(each.state_dict()) for each in optimizers],
        "generators": generators(),
    }
    Path(f"observed-rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
