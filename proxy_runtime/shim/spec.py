"""What a shim is asked to run, and what it answers. Plain data, JSON in both directions."""

from __future__ import annotations

import dataclasses
import signal
from dataclasses import dataclass, field
from typing import Any

from model.manifest import Pack
from model.units import counted
from proxy_runtime.errors import ErgoError
from proxy_runtime.process.namespace import Network

SLOTS_PER_DEVICE = 8
"""How many processes of a job that starts its own ranks may use one device at a time (docs/design/0003)."""


class RunError(ErgoError):
    """A job could not be started, cut, restored or finished."""

    code = "run"


@dataclass(frozen=True, slots=True)
class NodePart:
    """Which part of a job of a fleet is on this node, in one epoch.

    Attributes:
        node: this node, as ``name@incarnation``.
        epoch: the placement generation, from 1.
        device_of_rank: for each rank of the job, the global index of its device.
        local_devices: which of the devices are here.
        tenant: whose share of the node's store is used.
    """

    node: str
    epoch: int
    device_of_rank: tuple[int, ...]
    local_devices: tuple[int, ...]
    tenant: str

    @property
    def ranks(self) -> list[int]:
        """Numbers of the local ranks."""
        return [rank for rank, device in enumerate(self.device_of_rank) if device in self.local_devices]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> NodePart:
        lists = {name: tuple(data[name]) for name in ("device_of_rank", "local_devices")}
        return cls(**{**data, **lists})


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One job on one node as `ergo run` starts it, or a node's part of a job of a fleet.

    Attributes:
        job_id: letters, digits and dashes; names the run directory.
        argv: the command of every rank, interpreter first.
        cwd: the job directory: absolute, seen by the ranks at this very path.
        env: the environment of the ranks before ours is added.
        world_size: number of ranks, constant for life. With `pack` node: of channels, `SLOTS_PER_DEVICE` a device.
        devices: number of devices of the whole job (the width), 1 to `world_size`.
        device_kind: torch device type that the proxies execute on.
        threads: threads per device proxy, constant for life (bits depend on it).
        device_memory: bytes that a rank, or each process of a tree, may have on its device; 0: as many as it has.
        network: `host` or `private`.
        transport: how proxies of this node reach each other, `shm` or `tcp`.
        checkpoint_dir: store of the job's checkpoints.
        linger: keep running when the client that started the job is gone.
        base_dir: where the job directory's own files are on this machine; `cwd` unless restored elsewhere.
        part: of a job of a fleet; None where the whole job is here.
        python: interpreter of the job, whose torch the device proxies compute with; empty: this program's own.
        pack: `rank`: each rank is a process tree of its own, on one device. `node`: one tree, which starts its own
            ranks and sees all devices.
    """

    job_id: str
    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    world_size: int
    devices: int
    checkpoint_dir: str
    device_kind: str = "cpu"
    threads: int = 1
    device_memory: int = 0
    network: Network = "host"
    transport: str = "shm"
    linger: bool = False
    base_dir: str = ""
    part: NodePart | None = None
    pack: Pack = "rank"
    python: str = ""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise RunError(f"a job needs at least one rank, not {self.world_size}.", code="run.bad-spec")
        if not 1 <= self.devices <= self.world_size:
            raise RunError(
                f"{counted(self.devices, 'device')} for {counted(self.world_size, 'rank')}: a job uses at least one "
                "device and at most as many as it has ranks.",
                code="run.bad-spec",
                remedy="Lower --devices or raise --nproc.",
            )
        if self.pack == "node" and self.world_size != self.devices * SLOTS_PER_DEVICE:
            raise RunError(
                "a job that starts its own ranks keeps the number of devices that it began with.",
                code="run.bad-width",
            )
        if self.part is not None:
            placed, local = self.part.device_of_rank, self.part.local_devices
            if len(placed) != self.world_size or set(placed) != set(range(self.devices)):
                raise RunError(
                    f"the placement {placed} does not put {counted(self.world_size, 'rank')} on "
                    f"{counted(self.devices, 'device')}.",
                    code="run.bad-spec",
                )
            if not local or not set(local) <= set(placed):
                raise RunError(f"devices {local} of this node are not in the placement.", code="run.bad-spec")
            if self.pack == "node" and len(local) != self.devices:
                raise RunError(
                    f"{len(local)} of {self.devices} devices are on this node, but a job that starts its own ranks is "
                    "on one node as a whole.",
                    code="run.bad-spec",
                )

    @property
    def processes(self) -> int:
        """How many process trees the whole job has; each has a log."""
        return 1 if self.pack == "node" else self.world_size

    @property
    def lower(self) -> str:
        """The directory under the job's overlay."""
        return self.base_dir or self.cwd

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunSpec:
        part = data.get("part")
        return cls(**{**data, "argv": tuple(data["argv"]), "part": None if part is None else NodePart.from_json(part)})


def contiguous_placement(world_size: int, devices: int) -> tuple[int, ...]:
    """Device index of every rank: contiguous groups, so that each forms whole subtrees of a reduction."""
    return tuple(rank * devices // world_size for rank in range(world_size))


@dataclass(frozen=True, slots=True)
class CutRequest:
    """How a cut is to be taken.

    Attributes:
        move: end the processes and restore them from the checkpoint (fresh namespaces, fresh proxies);
            otherwise the job goes on and the checkpoint is written behind its back.
        keep_processes: of a move to another width: only device state moves, to fresh proxies. The processes stay, and
            no checkpoint is taken.
        at_step: prefer the moment when every rank's device work of this step is done; None: now.
        step_deadline_s: how long to wait for `at_step` before *now* is taken.
        deadline_s: limit for every single phase of the cut.
        devices: width after the move; None: as before.
        stop: end the job after the checkpoint is committed instead of restoring it (suspend to disk).
    """

    move: bool = True
    at_step: int | None = None
    step_deadline_s: float = 60.0
    deadline_s: float = 60.0
    devices: int | None = None
    stop: bool = False
    keep_processes: bool = False


@dataclass(slots=True)
class CutReport:
    """What a cut did. Times in milliseconds, sizes in bytes.

    `outcome` is `moved` (without a `checkpoint` where the processes were kept), `checkpointed`, `stopped`, `job-ended`
    (nothing was left to cut) or `called-off` (it failed, `error` says why, and the job runs on as it was). `devices` is
    the width at which a job that has `moved` goes on, else 0. `sharing` is
    what ranks on one device have shared since they are there: the sums of their proxies' counters (docs/design/0004),
    empty where every rank had one of its own.
    """

    outcome: str = "called-off"
    error: str = ""
    code: str = ""
    checkpoint: str = ""
    epoch: int = 0
    devices: int = 0
    steps: list[int] = field(default_factory=list)
    reached_step: bool = True
    contributed: dict[str, dict[str, int]] = field(default_factory=dict)
    pending_operations: int = 0
    pending_bytes: int = 0
    image_bytes: int = 0
    device_bytes: int = 0
    sharing: dict[str, int] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def rank_variables(rank: int, world_size: int, *, port: int = 29500) -> dict[str, str]:
    """The environment by which torch.distributed knows a rank, which has the only device of its node."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a rank ended. `signal` is 0 unless it was killed."""

    rank: int
    code: int
    signal: int = 0

    @property
    def sentence(self) -> str:
        if self.signal:
            return f"rank {self.rank} was killed by {signal_name(self.signal)}"
        return f"rank {self.rank} exited with code {self.code}"


def signal_name(number: int) -> str:
    """As `kill -l` calls it; real-time signals by their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
