"""What the example scripts have in common: a log of losses, and the two lines of evidence at the end.

The losses stay on the device and are fetched in blocks, so that a training loop does not wait for the device
at every step. Everything written here depends only on numbers, never on time or place, except the timing that
``--time-steps`` asks for. Nothing here knows how the script was started.
"""

import argparse
import hashlib
import json
import statistics
import struct
import sys
import time
from pathlib import Path

import torch


def add_report_arguments(parser: argparse.ArgumentParser, default_out: str) -> None:
    """Adds the options that every example has: where results go, how often to look at the loss, timing."""
    parser.add_argument("--out", type=Path, default=Path(default_out), help="directory for results (made if missing)")
    parser.add_argument("--log-every", type=int, default=10, help="print the loss of every n-th step (0: never)")
    parser.add_argument("--sync-every", type=int, default=10, help="fetch losses from the device in blocks of n steps")
    parser.add_argument(
        "--time-steps", action="store_true", help="measure the wall time of a step, in blocks of --sync-every"
    )
    parser.add_argument("--warm-up", type=int, default=20, help="first steps that --time-steps leaves out")


def say(line: str) -> None:
    """Prints a line in one write: `print` under torchrun (``python -u``) makes two, and lines of ranks get mixed."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class LossLog:
    """The losses of one rank, kept on the device until a block of them is fetched.

    Fetching a block waits for the device, so the time between two fetches, divided by the steps between them, is
    an honest time per step: nothing of the block is still queued when the clock is read.
    """

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        if args.sync_every < 1:
            raise SystemExit("--sync-every must be at least 1")
        self._args = args
        self._rank = rank
        self._waiting: list[torch.Tensor] = []
        self._block_ms: list[float] = []
        # The wall clock: a process that was frozen and goes on elsewhere finds its monotonic clock where it left it.
        self._block_started: float | None = None
        self.losses: list[float] = []
        self.evaluations: list[float] = []

    def start(self) -> None:
        """Starts the clock of the first block; call it right before the first step."""
        self._block_started = time.time()

    def step(self, loss: torch.Tensor) -> None:
        """Notes the loss of the next step; every ``--sync-every`` steps waits for the device."""
        self._waiting.append(loss.detach())
        if len(self._waiting) >= self._args.sync_every:
            self._fetch()

    def evaluation(self, name: str, value: float) -> None:
        """Notes and prints a measurement beside training; the time it took is no part of any step's."""
        self._fetch()
        self.evaluations.append(value)
        say(f"step {len(self.losses)} {name} {value:.6f}")
        self._block_started = time.time()

    def finish(self, model: torch.nn.Module | None = None) -> None:
        """Writes ``losses-rank{r}.json`` (and, on rank 0, ``weights.pt``) and prints the digests."""
        self._fetch()
        out: Path = self._args.out
        out.mkdir(parents=True, exist_ok=True)
        weights = {} if model is None else {name: value.detach().cpu() for name, value in model.state_dict().items()}
        result: dict[str, object] = {
            "rank": self._rank,
            "losses": [value.hex() for value in self.losses],
            "evaluations": [value.hex() for value in self.evaluations],
            "losses_sha256": numbers_sha256(self.losses + self.evaluations),
            "weights_sha256": weights_sha256(weights),
        }
        if self._args.time_steps:
            timing = result["step_ms"] = self._timing()
            say(f"rank {self._rank} step ms {json.dumps(timing)}")
        path = out / f"losses-rank{self._rank}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        if self._rank == 0 and weights:
            torch.save(weights, out / "weights.pt")
        say(f"rank {self._rank} losses sha256 {result['losses_sha256']} weights sha256 {result['weights_sha256']}")

    def _fetch(self) -> None:
        if not self._waiting:
            return
        first = len(self.losses)
        values = torch.stack(self._waiting).cpu().tolist()
        if self._block_started is not None and len(values) == self._args.sync_every and first >= self._args.warm_up:
            self._block_ms.append((time.time() - self._block_started) * 1e3 / len(values))
        self._waiting.clear()
        self.losses += values
        for step, value in enumerate(values, start=first + 1):
            if self._args.log_every and step % self._args.log_every == 0:
                say(f"step {step} loss {value:.6f}")
        self._block_started = time.time()

    def _timing(self) -> dict[str, object]:
        """Statistics over the blocks' mean step times, in ms."""
        if len(self._block_ms) < 2:
            raise SystemExit("--time-steps needs at least two blocks after the warm-up: raise --steps")
        low, median, high = statistics.quantiles(self._block_ms, n=4, method="inclusive")
        return {
            "median": median,
            "lower_quartile": low,
            "upper_quartile": high,
            "longest": sorted(self._block_ms, reverse=True)[:32],
            "blocks": len(self._block_ms),
            "steps_per_block": self._args.sync_every,
        }


def numbers_sha256(values: list[float]) -> str:
    """Digest of the exact values, each as a little-endian double."""
    return hashlib.sha256(struct.pack(f"<{len(values)}d", *values)).hexdigest()


def weights_sha256(weights: dict[str, torch.Tensor]) -> str:
    """Digest of names, types, shapes and exact bytes of a state dict on the CPU."""
    digest = hashlib.sha256()
    for name, value in weights.items():
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
