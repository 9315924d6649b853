"""The checkpoint store alone: how fast content becomes durable and comes back."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from blake3 import blake3

from benchmarks.harness import Condition, Context, Figure, benchmark
from model.ids import Step
from model.manifest import HostClass, ManifestHeader, NumericsClass, RankState
from proxy_runtime.checkpoint import Part, Store

_BYTES = 256 << 20  # the image of one rank
_CHANGED = 16 << 20


@benchmark("checkpoint")
def checkpoint(context: Context) -> Iterator[Figure]:
    """Write an image until it is durable, write it again with 6 % of it changed, verify it, restore it."""
    folder = context.directory()
    first, second = folder / "first", folder / "second"
    content = blake3(b"image").digest(_BYTES)
    first.write_bytes(content)
    # Pages put in front shift the others, as in the image of a process that has grown.
    second.write_bytes(blake3(b"new").digest(_CHANGED) + content[:-_CHANGED])
    samples: dict[str, list[float]] = {"write": [], "write_again": [], "verify": [], "restore": []}
    new_bytes: list[float] = []
    for turn in range(context.repeat):
        store = Store.open(folder / f"store{turn}")
        os.sync()  # what others wrote is not to be paid here
        samples["write"].append(_rate(lambda s=store: _write(s, first, 1)))
        samples["write_again"].append(_rate(lambda s=store: _write(s, second, 2)))
        reader = store.read()
        new_bytes.append(reader.manifest.stored_bytes / _CHANGED)
        samples["verify"].append(_rate(lambda r=reader: r.verify()))
        samples["restore"].append(_rate(lambda r=reader: r.restore_part(Part.process(0), folder / "restored")))
        shutil.rmtree(folder / "restored")
        shutil.rmtree(store.path)
    # A rank's image of 260 MB is to be written and restored within the 2 s of a move.
    for name, bound in {"write": 300, "write_again": 600, "verify": 600, "restore": 300}.items():
        yield Figure(f"checkpoint.{name}", "MB/s", samples[name], Condition(">=", bound))
    yield Figure("checkpoint.stored_per_changed", "x", new_bytes, Condition("<=", 1.2))


def _rate(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return _BYTES / (time.perf_counter() - start) / 1e6


def _write(store: Store, image: Path, step: int) -> None:
    header = ManifestHeader(
        world_size=1,
        placement=("cpu:0",),
        argv=("benchmark",),
        cwd="/",
        build_id="benchmark",
        numerics=NumericsClass(torch="-", device_model="cpu", instruction_set="-", threads_per_device=1),
        host=HostClass(cpu_features=(), kernel_release="-"),
        created_at_ns=step,
        ranks=(RankState(rank=0, step=Step(step)),),
    )
    with store.begin("benchmark", 1) as writer:
        writer.add_file(Part.process(0), "pages-1.img", image)
        writer.commit(header)
