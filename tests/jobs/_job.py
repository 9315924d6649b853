"""What the job scripts share: device and process group, a digest of everything seen, and ways to waste time."""

import hashlib
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Job:
    """Where this rank runs, and the running digest of its values."""

    device: torch.device
    rank: int
    world_size: int
    _digest: Any = field(default_factory=hashlib.sha256)

    def see(self, *values: Any) -> None:
        """Adds tensors (exact bytes, type and shape) and JSON values (floats exactly) to the digest."""
        for value in values:
            if isinstance(value, torch.Tensor):
                self._digest.update(f"{value.dtype} {list(value.shape)}\n".encode())
                self._digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            else:
                self._digest.update(json.dumps(value, sort_keys=True).encode() + b"\n")

    def progress(self, n: int) -> None:
        """Says how far the job is."""
        say(f"PROGRESS {n}")

    def result(self) -> None:
        """Prints the rank's result line and leaves the process group, if there is one."""
        say(f"RESULT {self._digest.hexdigest()} rank {self.rank}")
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def say(line: str) -> None:
    """Prints a line in one write: `print` under torchrun (``python -u``) makes two, and lines of ranks get mixed."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def start(*, min_ranks: int = 1) -> Job:
    """Picks the device; joins the default process group if there are several ranks."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size < min_ranks:
        raise SystemExit(f"this job needs at least {min_ranks} ranks, there are {world_size}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Job(device, rank, world_size)


def synchronize(device: torch.device) -> None:
    """Waits for the device; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_rng_state(device: torch.device) -> torch.Tensor:
    """State of the generator that draws on the device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def compute_on_host(seconds: float) -> None:
    """Uses that much CPU time of this process without touching the device."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Skew:
    """Delays that differ from rank to rank, but are the same in every run."""

    def __init__(self, seed: int, seconds: float) -> None:
        self._random = random.Random(seed)
        self._seconds = seconds

    def __call__(self) -> None:
        choice, length = self._random.random(), self._seconds * self._random.random()
        if choice < 0.3:
            time.sleep(length)
        elif choice < 0.5:
            compute_on_host(length)
