"""Data-parallel training of one small model after the other, as a benchmark asks for it; see `_serving.py`.

What was made before is dropped, so that ranks are started once for many jobs.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from _serving import serve
from steps import Gpt, Recurrent, convolutions, perceptron
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

# Model, shape of a batch; whole numbers for a model of texts.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (perceptron, (64, 64)),
    "cnn": (convolutions, (16, 3, 32, 32)),
    "gpt_64": (lambda: Gpt(64, 4, 32), (2, 32)),
    "gpt_256": (lambda: Gpt(256, 4, 32), (1, 32)),
    "lstm": (Recurrent, (16, 24, 32)),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False),
}


class Training:
    """One job. Ranks draw different batches."""

    def __init__(
        self,
        model: str,
        optimizer: str,
        *,
        bf16: bool = False,
        clip: bool = False,
        ema: bool = False,
        accumulate: int = 1,
        bucket_view: bool = True,
    ) -> None:
        make, shape = MODELS[model]
        torch.manual_seed(1)
        self.model = DistributedDataParallel(make().cuda(), gradient_as_bucket_view=bucket_view)
        self.parameters = list(self.model.parameters())
        self.optimizer = OPTIMIZERS[optimizer](self.parameters)
        self.average = [each.detach().clone() for each in self.parameters] if ema else []
        self.bf16, self.clip, self.accumulate = bf16, clip, accumulate
        torch.manual_seed(100 + dist.get_rank())
        texts = model.startswith("gpt")
        self.inputs = [torch.randint(96, shape) if texts else torch.randn(shape) for _ in range(4)]
        self.labels = [torch.randint(96, shape) if texts else torch.randint(10, shape[:1]) for _ in range(4)]
        self.turn = 0

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        for micro in range(self.accumulate):
            self.turn = (self.turn + 1) % 4
            x, y = self.inputs[self.turn].cuda(), self.labels[self.turn].cuda()
            last = micro == self.accumulate - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                with torch.autocast("cuda", torch.bfloat16, enabled=self.bf16):
                    scores = self.model(x)
                    loss = cross_entropy(scores.flatten(0, -2), y.flatten())
                loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        for average, parameter in zip(self.average, self.parameters, strict=bool(self.average)):
            average.lerp_(parameter.detach(), 0.1)
        return loss.detach()

    def state(self) -> list[torch.Tensor]:
        """What the optimizer keeps on the device."""
        values = (value for state in self.optimizer.state.values() for value in state.values())
        return [value for value in values if isinstance(value, torch.Tensor) and value.is_cuda]


def storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return list(found.values())


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(storage.nbytes() for storage in storages(tensors))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("nccl")
    job: Training | None = None
    losses: list[float] = []

    def here() -> Training:
        assert job is not None
        return job

    def make(**fields: Any) -> dict[str, Any]:
        nonlocal job
        job = None
        gc.collect()
        losses.clear()
        job = Training(**fields)
        torch.cuda.synchronize()
        return {}

    def window(steps: int) -> dict[str, Any]:
        began, training = time.perf_counter(), here()
        for _ in range(steps):
            loss = training.step()
        losses.append(loss.item())
        torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - began}

    def sizes() -> dict[str, Any]:
        """Bytes; the peak is this rank's own, as its script sees it."""
        training = here()
        torch.cuda.synchronize()
        return {
            "model": nbytes([*training.parameters, *training.state()]),
            "gradients": sum(each.numel() * each.element_size() for each in training.parameters),
            "statistics": nbytes(training.model.buffers()),
            "peak": torch.cuda.max_memory_allocated(),
        }

    def forget_peak() -> dict[str, Any]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return {}

    def release(statistics: bool) -> dict[str, Any]:
        """Gives back the bytes of parameters and optimizer state, or those of buffers. The job cannot go on."""
        training = here()
        tensors = training.model.buffers() if statistics else [*training.parameters, *training.state()]
        for storage in storages(tensors):
            storage.resize_(0)
        torch.cuda.synchronize()
        return {}

    def digest() -> dict[str, Any]:
        total = hashlib.sha256(repr(losses).encode())
        for tensor in [*here().parameters, *here().state()]:
            total.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return {"digest": total.hexdigest()}

    serve(
        {
            "make": make,
            "window": window,
            "sizes": sizes,
            "forget_peak": forget_peak,
            "release": release,
            "digest": digest,
        }
    )


main()
