"""Nodes on this machine: each with a directory, a runtime and a peer of its own; they share the fleet's store only."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from model.control import AdvanceHeadInput, AllocateEpochInput, OpenJobInput
from model.ids import CheckpointId, DeviceId, Epoch, JobId, NodeId
from model.job_spec import JobSpec, parse_job_spec
from model.placement import Placement
from model.records import NodeDevice, NodeRecord
from model.runtime import (
    AttendInput,
    AttendResult,
    BarrierInput,
    CheckpointInput,
    CheckpointResult,
    CollectiveTarget,
    Progress,
    RestoreInput,
    RestoreResult,
    StopInput,
    TransferInput,
    TransferResult,
)
from proxy_runtime.cut.agreement import targets
from proxy_runtime.node.lease import boot_id, claim
from proxy_runtime.node.runtime import LocalNodeRuntime
from proxy_runtime.node.serving import routes
from proxy_runtime.storage.blobs import Bucket
from proxy_runtime.storage.fleet import FleetStore
from proxy_runtime.storage.peer import PeerServer

ROOT = Path(__file__).resolve().parents[3]
JOBS = ROOT / "tests" / "jobs"
DEADLINE_S = 120.0
T = TypeVar("T")


def until(condition: Callable[[], object], what: str, seconds: float = DEADLINE_S) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"timed out: {what}"
        time.sleep(0.02)


class Machine:
    """A node with two devices."""

    def __init__(self, name: str, root: Path, fleet: FleetStore) -> None:
        self.root = root
        self.fleet = fleet
        root.mkdir(parents=True, exist_ok=True)
        self.runtime: LocalNodeRuntime
        self.peer = PeerServer(
            fleet.peer_token, lambda tenant: self.runtime.storage.store(tenant), routes=routes(lambda: self.runtime)
        )
        address = self.peer.start()
        node = NodeId(name, 1)
        devices = tuple(NodeDevice(id=DeviceId(node, (f"cpu-{n}",)), accelerator="cpu") for n in range(2))
        self._devices = devices
        self.runtime = self._runtime(node)
        record = NodeRecord(
            node=node, cluster="local", boot_id=boot_id(), address=address, devices=devices,
            numerics=self.runtime.numerics,
        )  # fmt: skip
        claimed, _ = claim(fleet, record, root)
        assert claimed.node == node

    @property
    def node(self) -> NodeId:
        return self.runtime.node

    def restart_agent(self) -> None:
        """What an agent that starts again makes of the directory; the one before is forgotten without a word."""
        self.runtime = self._runtime(self.node)

    def close(self) -> None:
        """Ends all that is here."""
        self.runtime.end_everything("The test is over.")
        self.peer.stop()

    def _runtime(self, node: NodeId) -> LocalNodeRuntime:
        return LocalNodeRuntime(node, self.root, self.fleet, host="127.0.0.1", devices=self._devices)


@dataclass(frozen=True)
class Held:
    """An epoch that is held at a cut, and may be gone back to."""

    epoch: Epoch
    machines: list[Machine]
    cut: int
    placement: Placement

    def ranks(self, machine: Machine) -> set[int]:
        return {*self.placement.ranks_at(machine.node)}


@dataclass
class Driver:
    """Drives one job as its workflow does."""

    fleet: FleetStore
    spec: JobSpec
    job: JobId = field(default_factory=lambda: JobId(f"t-{secrets.token_hex(4)}"))
    epoch: Epoch = field(default_factory=lambda: Epoch(0))
    cut: int = 0
    placement: Placement | None = None
    machines: list[Machine] = field(default_factory=list)
    progress: dict[str, Progress] = field(default_factory=dict)
    attends: dict[str, Future[AttendResult]] = field(default_factory=dict)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))

    def __post_init__(self) -> None:
        self.run = secrets.token_hex(8)
        self.fleet.open_job(OpenJobInput(self.job, self.spec.tenant, self.run, self.run))

    # ------------------------------------------------------------------ epochs and placements

    def next_epoch(self, *places: tuple[Machine, int], advance: bool = True) -> None:
        """As many ranks on each place, in order; a job that starts its own ranks has them all on one node."""
        self.epoch = self.fleet.allocate_epoch(AllocateEpochInput(self.job, self.run)).epoch
        self.cut = 0
        devices = tuple(DeviceId(machine.node, (f"cpu-{index}",)) for machine, index in places)
        ranks = self.spec.world_size
        device_of_rank = tuple(rank * len(places) // ranks for rank in range(ranks))
        self.placement = Placement(self.epoch, devices, device_of_rank, self.spec.devices_per_rank)
        self.machines = list(dict.fromkeys(machine for machine, _ in places))
        if advance:
            self.advance()

    def advance(self) -> None:
        nodes = tuple(machine.node for machine in self.machines)
        self.fleet.advance_head(AdvanceHeadInput(self.job, self.run, self.epoch, nodes))

    # ------------------------------------------------------------------ calls on all nodes

    def each(self, call: Callable[[Machine], T]) -> list[T]:
        return list(self.pool.map(call, self.machines))

    def attend(self, start: Literal["fresh", "restored"]) -> None:
        assert self.placement is not None
        for machine in self.machines:
            request = AttendInput(self.job, self.epoch, machine.node, self.spec, self.placement, start)
            name = machine.node.name
            runtime = machine.runtime

            def report(progress: Progress, name: str = name) -> None:
                self.progress[name] = progress

            self.progress.pop(name, None)
            self.attends[name] = self.pool.submit(runtime.attend, request, report)

    def until_step(self, step: int) -> None:
        names = [machine.node.name for machine in self.machines]

        def there() -> bool:
            for name in names:
                if self.attends[name].done():
                    raise AssertionError(f"{name} has ended: {self.attends[name].result()}\n{self.tails()}")
            return all(name in self.progress and self.progress[name].step >= step for name in names)

        until(there, f"step {step} of {self.job}; {self.progress}")

    def results(self) -> list[AttendResult]:
        found = [self.attends[machine.node.name].result(DEADLINE_S) for machine in self.machines]
        self.attends.clear()
        return found

    def barrier(self) -> None:
        """Stop and finish on all nodes."""
        self.cut += 1
        stopped = self.each(lambda m: m.runtime.barrier(BarrierInput(self.job, self.epoch, self.cut, "stop", 60.0)))
        reports = [
            {c.name: {"contributed": c.contributed, "completed": c.completed, "members": c.members}
             for c in rank.communicators}
            for each in stopped for rank in each.ranks
        ]  # fmt: skip
        goal = tuple(CollectiveTarget(name, count) for name, count in targets(reports).items())  # type: ignore[arg-type]
        self.each(
            lambda m: m.runtime.barrier(BarrierInput(self.job, self.epoch, self.cut, "finish", 60.0, targets=goal))
        )

    def checkpoint(
        self, kind: Literal["live", "full", "leaving", "final"], leave: Mapping[str, Sequence[int]] | None = None
    ) -> CheckpointResult:
        if kind != "final":
            self.barrier()
        number = 0 if kind == "final" else self.cut

        def write(machine: Machine) -> CheckpointResult:
            ranks = tuple((leave or {}).get(machine.node.name, ()))
            request = CheckpointInput(self.job, self.epoch, number, kind, 120.0, ranks=ranks)
            return machine.runtime.checkpoint(request)

        written = self.each(write)
        parts = tuple(each.parts for each in written if each.parts is not None)
        assert len(parts) == len(self.machines)
        commit = CheckpointInput(self.job, self.epoch, number, kind, 120.0, commit=parts)
        return self.machines[0].runtime.checkpoint(commit)

    def transfer(
        self,
        checkpoint: CheckpointId,
        sources: Sequence[NodeId] = (),
        *,
        ahead: bool = False,
        keeps: Collection[str] = (),
        all_stay: bool = False,
    ) -> list[TransferResult]:
        def one(machine: Machine) -> TransferResult:
            assert self.placement is not None
            return machine.runtime.transfer(
                TransferInput(
                    self.job,
                    self.epoch,
                    checkpoint,
                    (*sources, "store"),
                    60.0,
                    ahead=ahead,
                    tenant=self.spec.tenant,
                    ranks=() if all_stay else self.placement.ranks_at(machine.node),
                    spec=self.spec if ahead else None,
                    placement=self.placement if ahead else None,
                    keeps=machine.node.name in keeps,
                )
            )

        return self.each(one)

    def restore(
        self,
        checkpoint: CheckpointId,
        *,
        beside: bool = False,
        cut: int = 0,
        come: bool = False,
        keeps: Collection[str] | None = None,
    ) -> list[RestoreResult]:
        def one(machine: Machine) -> RestoreResult:
            assert self.placement is not None
            here = keeps is None or machine.node.name in keeps
            request = RestoreInput(
                self.job, self.epoch, machine.node, self.spec, self.placement, checkpoint, 120.0,
                beside=beside and here, cut=cut if here else 0, come=come and here,
            )  # fmt: skip
            return machine.runtime.restore(request)

        return self.each(one)

    def keep(self, *places: tuple[Machine, int]) -> tuple[Epoch, list[Machine], int]:
        """Gives the processes of this epoch to the next one, made ready ahead; what is to be gone back to."""
        nothing = CheckpointId("ck-" + "0" * 40)
        before, placement = (self.epoch, self.machines, self.cut + 1), self.placement
        self.next_epoch(*places, advance=False)
        after, fresh = (self.epoch, self.machines), self.placement
        self.transfer(nothing, ahead=True, keeps=[machine.node.name for machine in self.machines], all_stay=True)
        self.epoch, self.machines, self.cut, self.placement = before[0], before[1], before[2] - 1, placement
        self.barrier()
        self.epoch, self.machines, self.cut, self.placement = *after, 0, fresh
        self.restore(nothing, beside=True, cut=before[2])
        return before

    def move_some(self, *places: tuple[Machine, int], before_restore: Callable[[], object] = lambda: None) -> Held:
        """Makes the next epoch, in which only some ranks are on another node; paused, beside what is held."""
        held = self.held()
        known = self.checkpoint("live").checkpoint
        assert known is not None
        here = [machine.node for machine in self.machines]
        self.next_epoch(*places, advance=False)
        stay = {machine.node.name for machine in self.machines if held.ranks(machine) & self.ranks(machine)}
        leave = {
            machine.node.name: sorted(
                held.ranks(machine) - (self.ranks(machine) if machine in self.machines else set())
            )
            for machine in held.machines
        }
        self.transfer(known, here, ahead=True, keeps=stay)
        after = self.held()
        self.back_to(held)
        self.cut += 1
        left = self.checkpoint("leaving", leave).checkpoint
        assert left is not None
        cut = self.cut
        self.back_to(after)
        self.transfer(left, here)
        before_restore()
        self.restore(left, beside=True, cut=cut, come=True, keeps=stay)
        return replace(held, cut=cut)

    def held(self) -> Held:
        """Where it is."""
        assert self.placement is not None
        return Held(self.epoch, self.machines, self.cut, self.placement)

    def back_to(self, held: Held) -> None:
        """It is there again."""
        self.epoch, self.machines, self.cut, self.placement = held.epoch, held.machines, held.cut, held.placement

    def ranks(self, machine: Machine) -> set[int]:
        """Of this job on a node."""
        return self.held().ranks(machine)

    def counts(self, before: tuple[Epoch, list[Machine], object]) -> None:
        """The epoch that was made beside another one is the job from now on, and that one is ended."""
        self.advance()
        self.attend("restored")
        self.stop(before[1], epoch=before[0])

    def pids(self) -> dict[int, int]:
        """Of the ranks on all nodes."""
        parts = [machine.runtime.parts.get(self.job, self.epoch) for machine in self.machines]
        return {rank: pid for part in parts if part for rank, pid in part.client.status().rank_pids.items()}

    def resume(self) -> None:
        self.each(lambda m: m.runtime.barrier(BarrierInput(self.job, self.epoch, self.cut, "resume", 60.0)))

    def stop(self, machines: Sequence[Machine] = (), *, epoch: Epoch | None = None, only: bool = False) -> None:
        for machine in machines or self.machines:
            machine.runtime.stop(StopInput(self.job, epoch or self.epoch, "a test says so", only=only))

    # ------------------------------------------------------------------ what it computed

    def log(self, rank: int) -> str:
        assert self.placement is not None
        machine = next(m for m in self.machines if m.node == self.placement.device(rank).node)
        part = machine.runtime.parts.get(self.job, self.epoch)
        return part.client.layout.current.log(rank).read_text(errors="replace") if part else ""

    def digests(self) -> dict[int, str]:
        """Of all values that every rank has seen."""
        found = {}
        for rank in range(self.spec.ranks):
            for match in re.finditer(r"^RESULT ([0-9a-f]{64}) rank (\d+)$", self.log(rank), re.MULTILINE):
                found[int(match[2])] = match[1]
        return found

    def tails(self) -> str:
        return "\n".join(f"--- rank {rank}\n{self.log(rank)[-1500:]}" for rank in range(self.spec.ranks))


def make_fleet(root: Path) -> FleetStore:
    return FleetStore(Bucket.open(f"file://{root}/store"), b"s" * 32)


def make_spec(script: str, *arguments: str, ranks: int = 2, **more: object) -> JobSpec:
    command = ["python", str(JOBS / script), *arguments]
    return parse_job_spec({"apiVersion": "ergosphere/v1", "argv": command, "ranks": ranks, **more})


__all__ = ["DEADLINE_S", "JOBS", "Driver", "Machine", "make_fleet", "make_spec", "until"]
