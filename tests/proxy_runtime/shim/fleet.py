"""Several nodes on this machine: each with run directories and a store of its own, and a shim per part."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from model.ids import CheckpointId
from model.manifest import PartRef
from model.runtime import AttendResult, BarrierResult, RestoreResult
from proxy_runtime import build
from proxy_runtime.build import Build
from proxy_runtime.checkpoint.parts import Part
from proxy_runtime.checkpoint.store import Store
from proxy_runtime.checkpoint.writer import WrittenParts
from proxy_runtime.cut.agreement import targets
from proxy_runtime.shim.header import job_header
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.part import Limits, PartStatus, PartWritten
from proxy_runtime.shim.part_client import PartClient
from proxy_runtime.shim.spec import NodePart, RunSpec

ROOT = Path(__file__).resolve().parents[3]
JOBS = ROOT / "tests" / "jobs"
TENANT = "default"
DEADLINE_S = 120.0


@dataclass
class Node:
    """A node: nothing of it is shared with another but the code and the tenant's key."""

    name: str
    root: Path
    key: bytes

    def __post_init__(self) -> None:
        self.runs.mkdir(parents=True)
        Store.open(self.store_dir, TENANT, key=self.key)

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def store_dir(self) -> Path:
        return self.root / "store"

    def store(self) -> Store:
        return Store.open(self.store_dir, TENANT, create=False)


@dataclass
class Fleet:
    """Drives a job of one rank per device, as the control plane would."""

    base: Path
    command: Sequence[str]
    job_id: str = field(default_factory=lambda: f"t-{secrets.token_hex(4)}")
    network: str = "host"
    env: dict[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    nodes: list[Node] = field(default_factory=list)
    epoch: int = 0
    running: int = 0  # the epoch that has the processes
    cut_number: int = 0
    parts: list[PartClient] = field(default_factory=list)
    specs: list[RunSpec] = field(default_factory=list)
    placement: tuple[int, ...] = ()
    all_parts: list[PartClient] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.build: Build = build.ensure()
        key = secrets.token_bytes(32)
        self.nodes = [Node(f"node-{n}", self.base / f"node-{n}", key) for n in (1, 2)]

    # ------------------------------------------------------------------ bringing it up

    def spawn(
        self,
        placement: Sequence[int],
        devices: Sequence[Sequence[int]],
        *,
        start: bool = True,
        kept: Sequence[PartClient] = (),
    ) -> None:
        """Parts of the next epoch: `devices` lists those of each node.

        Without `start` somebody else starts their shims; `kept` are parts in whose shims they are.
        """
        self.epoch += 1
        self.cut_number = 0
        self.placement = tuple(placement)
        self.parts, self.specs = [], []
        shims = iter(kept)
        for node, local in zip(self.nodes, devices, strict=True):
            if not local:
                continue
            base = node.root / f"base-{self.job_id}"
            base.mkdir(exist_ok=True)
            part = NodePart(f"{node.name}@1", self.epoch, self.placement, tuple(local), TENANT)
            spec = RunSpec(
                job_id=self.job_id,
                argv=(sys.executable, *self.command),
                cwd=f"/run/ergo/{self.job_id}.d",
                env={"PATH": os.environ["PATH"], "HOME": "/tmp", **self.env},
                world_size=len(placement),
                devices=len(set(placement)),
                checkpoint_dir=str(node.store_dir),
                network=self.network,  # type: ignore[arg-type]
                base_dir=str(base),
                part=part,
            )
            layout = RunLayout.of_part(node.runs, self.job_id, self.epoch)
            if kept:
                layout = next(shims).layout
                PartClient(layout, self.epoch).succeed(spec, self.running)
            elif start:
                PartClient.spawn(spec, self.build.root, node.runs, limits=self.limits)
            client = PartClient(layout, self.epoch)
            self.specs.append(spec)
            self.parts.append(client)
            self.all_parts.append(client)

    def each(self, call: Callable[[PartClient], object]) -> list:
        with ThreadPoolExecutor(len(self.parts)) as pool:
            return list(pool.map(call, self.parts))

    def connect(self, *, fresh: bool) -> None:
        found = self.each(lambda part: part.prepare("127.0.0.1", fresh=fresh))
        endpoints = [endpoint for each in found for endpoint in each]
        token = secrets.token_hex(16)
        self.each(lambda part: part.connect(endpoints, token))
        self.running = self.epoch if fresh else self.running

    def start(self, placement: Sequence[int] = (0, 1), devices: Sequence[Sequence[int]] = ((0,), (1,))) -> None:
        self.spawn(placement, devices)
        self.connect(fresh=True)

    def restore(
        self,
        checkpoints: dict[int, CheckpointId],
        placement: Sequence[int] = (0, 1),
        devices: Sequence[Sequence[int]] = ((0,), (1,)),
    ) -> list[RestoreResult]:
        """Makes the next epoch from a checkpoint; the ranks are paused."""
        self.spawn(placement, devices)
        self.connect(fresh=False)
        return self.each(lambda part: part.restore(checkpoints[min(ranks_of(part))]))

    def keep(self, placement: Sequence[int], devices: Sequence[Sequence[int]]) -> list[RestoreResult]:
        """Makes the next epoch from the processes of this one; the ranks stand still."""
        goal = self.stop()
        before, cut = self.parts, self.cut_number
        self.each(lambda part: part.finish(cut, goal))
        self.spawn(placement, devices, kept=before)
        self.connect(fresh=False)
        return self.each(lambda part: part.keep(cut))

    def go(self) -> None:
        self.each(lambda part: part.go())
        self.running = self.epoch

    def pids(self) -> dict[int, int]:
        """Of all ranks that live."""
        return {rank: pid for status in self.statuses() for rank, pid in status.rank_pids.items()}

    # ------------------------------------------------------------------ cuts

    def stop(self, **more: object) -> dict[str, int]:
        """Stops all queues; the targets over all nodes."""
        self.cut_number += 1
        found: list[BarrierResult] = self.each(lambda part: part.stop_queues(self.cut_number, **more))  # type: ignore[arg-type]
        counts = [
            {c.name: {"contributed": c.contributed, "completed": c.completed, "members": c.members}
             for c in rank.communicators}
            for result in found for rank in result.ranks
        ]  # fmt: skip
        return targets(counts)  # type: ignore[arg-type]

    def cut(self, kind: str, **more: object) -> list[PartWritten]:
        goal = self.stop(**more)
        self.each(lambda part: part.finish(self.cut_number, goal))
        return self.each(lambda part: part.write(self.cut_number, kind))  # type: ignore[arg-type]

    def commit(self, written: Sequence[PartWritten]) -> dict[int, CheckpointId]:
        """A manifest for each rank, with the volume of its node, and all packs on every node.

        The real one is a single one, whose volume joins those of all nodes, and its packs travel over the network.
        """
        states = sorted((state for each in written for state in each.parts.states), key=lambda state: state.rank)
        header = job_header(
            self.specs[0],
            self.build,
            tuple(f"device-{index}" for index in self.placement),
            tuple(states),
            max(each.created_at_ns for each in written),
        )
        packs = f"tenants/{TENANT}/packs"
        for source, target in (self.nodes, reversed(self.nodes)):
            shutil.copytree(source.store_dir / packs, target.store_dir / packs, dirs_exist_ok=True)
        found = {}
        for each in written:
            parts = [
                WrittenParts(_refs(other, volume=other is each), other.packs, 0, _exits(other)) for other in written
            ]
            for node in self.nodes:
                checkpoint = node.store().assemble(self.job_id, self.epoch, header, parts).id
                found |= {rank.rank: checkpoint for rank in each.parts.ranks}
        return found

    # ------------------------------------------------------------------ looking at it

    def statuses(self) -> list[PartStatus]:
        return self.each(lambda part: part.status())

    def step(self) -> int:
        return min(status.step for status in self.statuses())

    def until_step(self, step: int) -> None:
        until(lambda: self.step() >= step or self.over(), f"the job is at step {step}")
        assert not self.over(), [(part.result(), self.tails()) for part in self.parts]

    def until_step_is_moving(self) -> None:
        """Until every rank has done more than it has now."""
        self.until_progress(2)

    def until_progress(self, more: int) -> None:
        """Until every rank has got on by so many lines ``PROGRESS``; jobs without an optimizer have no steps."""
        before = [self.log(rank).count("PROGRESS") for rank in range(len(self.placement))]

        def done() -> bool:
            return all(self.log(rank).count("PROGRESS") >= count + more for rank, count in enumerate(before))

        until(lambda: done() or self.over(), "the job gets on")
        assert done(), self.tails()

    def start_elsewhere(self) -> None:
        """Starts a job of one rank from a process that ends at once."""
        self.spawn((0,), ((0,), ()), start=False)
        arguments = [json.dumps(self.specs[0].to_json()), str(self.build.root), str(self.nodes[0].runs)]
        subprocess.run([sys.executable, "-c", _STARTER, *arguments], check=True, cwd=ROOT, timeout=120)

    def over(self) -> bool:
        return any(status.result is not None for status in self.statuses())

    def wait(self) -> list[AttendResult]:
        found = self.each(lambda part: part.wait(DEADLINE_S))
        assert all(found), self.tails()
        return found

    def log(self, rank: int) -> str:
        for part in self.parts:
            path = part.layout.current.log(rank)
            if path.exists():
                return path.read_text(errors="replace")
        return ""

    def results(self) -> dict[int, str]:
        """What every rank has computed: the digest of all values it has seen."""
        found = {}
        for rank in range(len(self.placement)):
            for part in self.parts:
                path = part.layout.current.log(rank)
                for match in (
                    re.finditer(r"^RESULT ([0-9a-f]{64}) rank (\d+)$", path.read_text(), re.MULTILINE)
                    if path.exists()
                    else ()
                ):
                    found[int(match[2])] = match[1]
        return found

    def tails(self) -> str:
        return "\n".join(f"--- rank {rank}\n{self.log(rank)[-1500:]}" for rank in range(len(self.placement)))

    def end(self) -> None:
        """Ends all that was ever started."""
        with ExitStack() as stack:
            for part in self.all_parts:
                stack.callback(part.end)
        for name in (self.job_id, f"{self.job_id}.d"):
            mount_point = Path("/run/ergo") / name
            if mount_point.exists():
                mount_point.rmdir()


_STARTER = """
import json, sys
from pathlib import Path
from proxy_runtime.shim.part_client import PartClient
from proxy_runtime.shim.spec import RunSpec
spec, build_root, runs = RunSpec.from_json(json.loads(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
part = PartClient.spawn(spec, build_root, runs)
assert part.prepare("127.0.0.1", fresh=True) == ()
part.connect((), "token")
"""


def _refs(written: PartWritten, *, volume: bool) -> dict[Part, PartRef]:
    refs = {}
    for rank in written.parts.ranks:
        refs |= {Part.process(rank.rank): rank.process} if rank.process else {}
        refs |= {Part.device(rank.rank): rank.device} if rank.device else {}
    return refs | ({Part.volume(): written.parts.volume} if volume and written.parts.volume else {})


def _exits(written: PartWritten) -> dict[int, int]:
    return {rank.rank: rank.exit_code for rank in written.parts.ranks if rank.exit_code is not None}


def ranks_of(part: PartClient) -> list[int]:
    return sorted(part.status().steps)


def until(condition: Callable[[], object], what: str, seconds: float = DEADLINE_S) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"timed out: {what}"
        time.sleep(0.02)


def layouts(node: Node) -> list[RunLayout]:
    return [layout for layout, _ in RunLayout.parts_in(node.runs)]
