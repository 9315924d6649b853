"""Everything alive of one epoch of a job on a node: its local device proxies, rings and ranks.

The node may have the whole job, or a part of it (`RunSpec.part`): ranks and devices go by their numbers in the job.

A cut that moves the job makes a new generation from a checkpoint while the old one is held, and ends the
old one only when the new one stands; until then the old one can go on as if nothing had been asked.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy_runtime.build import Build
from proxy_runtime.channel.ring import Ring, RingError
from proxy_runtime.cut.agreement import verify_completed
from proxy_runtime.device.client import DeviceProxyClient, Zygote, connect_fabric
from proxy_runtime.device.wiring import Address, Pair
from proxy_runtime.process import criu, inspect, proc
from proxy_runtime.process.criu_setup import Criu
from proxy_runtime.process.namespace import Container, ContainerSpec, Overlay, Volume, hold_volume, launch
from proxy_runtime.shim import blame
from proxy_runtime.shim.claimants import Claimants
from proxy_runtime.shim.layout import EpochLayout
from proxy_runtime.shim.spec import SLOTS_PER_DEVICE, RankExit, RunError, RunSpec, contiguous_placement, rank_variables
from proxy_runtime.shim.workers import in_parallel

HELD_S = 10.0
"""How long a process may take to stop: it does at its next way out of the kernel."""


@dataclass(slots=True)
class Rank:
    """One local rank of a generation. `exit` is set once it has ended.

    `last_step` is the step that it had when last looked at: its ring goes before it is asked for the last time. Of a
    channel it counts the steps of all processes that have used it; each begins at 0 in the ring.
    `shared`: of a job that starts its own ranks. It is a channel that the tree's processes claim, and rank 0 has the
    container with the whole tree.
    """

    rank: int
    ring: Ring | None = None
    container: Container | None = None
    exit: RankExit | None = None
    last_step: int = 0
    shared: bool = False
    _looked_at: int | None = None
    _looking: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def has_tree(self) -> bool:
        """Whether a process tree of its own goes with it."""
        return self.rank == 0 or not self.shared

    @property
    def alive(self) -> bool:
        return self.container is not None and self.exit is None

    @property
    def leaving(self) -> bool:
        """Its interpreter is ending, and its process is still there."""
        return self.alive and not self.shared and self.ring is not None and self.ring.rank_leaving

    @property
    def bereft(self) -> bool:
        """It was told that a rank that it waited for had ended: whatever ended that one comes first."""
        return self.left_by is not None

    @property
    def left_by(self) -> int | None:
        """The rank that has ended while this one waited for it; None where it was not told so."""
        return blame.left_by(self.ring.error) if self.ring is not None else None

    @property
    def attached(self) -> bool:
        """The rank has mapped its ring and let go of the descriptor (or has ended)."""
        return self.shared or self.exit is not None or (self.ring is not None and self.ring.rank_attached)

    @property
    def step(self) -> int:
        """The last step whose device work is done."""
        if self.ring is not None:
            with suppress(ValueError), self._looking:  # being closed in another thread
                done, before = self.ring.step_done, self._looked_at
                if self.shared and before is not None:  # fewer than before are those of another process
                    self.last_step += done - before if done >= before else done
                else:
                    self.last_step = max(self.last_step, done)
                self._looked_at = done
        return self.last_step


@dataclass(slots=True)
class Generation:
    """Proxies and ranks of one epoch. Not thread-safe: one operation of the shim at a time drives it.

    Attributes:
        devices: number of devices of the whole job.
        placement: for every rank of the job the index of its device.
        proxies: local ones, by index of their devices.
        ranks: local ones.
        held: their processes are stopped by `hold`.
    """

    spec: RunSpec
    epoch: int
    layout: EpochLayout
    build: Build
    devices: int
    placement: tuple[int, ...]
    proxies: dict[int, DeviceProxyClient] = field(default_factory=dict)
    ranks: list[Rank] = field(default_factory=list)
    volume: Volume | None = None
    claimants: Claimants = field(default_factory=Claimants)
    held: bool = False
    _blame: blame.Blame = field(default_factory=blame.Blame, repr=False)

    # ------------------------------------------------------------------ bringing it up

    @classmethod
    def prepare(cls, spec: RunSpec, epoch: int, layout: EpochLayout, build: Build, devices: int) -> Generation:
        part = spec.part
        placement = part.device_of_rank if part else contiguous_placement(spec.world_size, devices)
        local = part.local_devices if part else tuple(range(devices))
        generation = cls(spec, epoch, layout, build, devices, placement)
        shared = spec.pack == "node"
        generation.ranks = [Rank(rank, shared=shared) for rank, device in enumerate(placement) if device in local]
        return generation

    @property
    def local_devices(self) -> list[int]:
        """Indices of the devices of the local ranks."""
        return sorted({self.placement[rank.rank] for rank in self.ranks})

    def fork_proxies(self, zygote: Zygote, deadline_s: float = 60.0) -> None:
        """Forks the local proxies from the zygote."""

        def fork(device: int) -> DeviceProxyClient:
            ids = {"job": self.spec.job_id, "epoch": self.epoch, "device": device}
            if self.spec.part is not None:
                ids["node"] = self.spec.part.node
            log = self.layout.proxy_log(device)
            return zygote.fork(log, threads=self.spec.threads, ids=ids, deadline_s=deadline_s)

        devices = self.local_devices
        forked = in_parallel([lambda device=device: fork(device) for device in devices])
        self.proxies = dict(zip(devices, forked, strict=True))

    def connect(
        self, remote: Mapping[Pair, Address] | None = None, token: str | None = None, deadline_s: float = 60.0
    ) -> None:
        """Connects the local proxies to one another and to those of other nodes; see `connect_fabric`."""
        connect_fabric(
            self.proxies,
            self.placement,
            transport=self.spec.transport,
            remote=remote,
            token=token,
            deadline_s=deadline_s,
        )

    def mount(self) -> None:
        """Mounts the job directory: as it was at submission, with what the job changed on top.

        A job that came from elsewhere sees its files at the path they had there; the path is made if need be.
        """
        os.makedirs(self.spec.cwd, exist_ok=True)
        overlay = Overlay(Path(self.spec.lower), self.layout.upper, self.layout.work, Path(self.spec.cwd))
        self.volume = hold_volume(self.build.init_binary, overlay)

    def launch_ranks(self) -> None:
        """Starts every rank in its own container; each waits at its first device call for `start`."""
        if self.spec.pack == "node":
            for rank in self.ranks:
                rank.ring = Ring.create(rank=rank.rank, build_id=self.build.id, shared=True)
            tree = self.ranks[0]
            tree.container = launch(self.build.init_binary, self.container_spec(tree), mounts_of=self.volume)
            return
        in_parallel([lambda rank=rank: self._launch(rank) for rank in self.ranks])

    def _launch(self, rank: Rank) -> None:
        rank.ring = Ring.create(rank=rank.rank, build_id=self.build.id)
        rank.container = launch(self.build.init_binary, self.container_spec(rank), mounts_of=self.volume)

    def attach(self) -> None:
        """Gives every living rank's ring to the proxy of its device."""
        in_parallel(
            [
                lambda rank=rank, ring=rank.ring: self.proxy_of(rank).attach(rank.rank, ring.fd)
                for rank in self.ranks
                if rank.ring is not None
            ]
        )

    def start(self) -> None:
        """Lets the proxies execute."""
        in_parallel([proxy.run for proxy in self.proxies.values()])

    def container_spec(self, rank: Rank, *, channel: bool = True) -> ContainerSpec:
        spec, layout = self.spec, self.layout
        tree = spec.pack == "node"  # whose script, or a launcher in it, says which rank a process is
        env = {
            **spec.env,
            **({} if tree else rank_variables(rank.rank, spec.world_size)),
            "PYTHONHASHSEED": spec.env.get("PYTHONHASHSEED", "0"),
            "PYTHONUNBUFFERED": spec.env.get("PYTHONUNBUFFERED", "1"),
            "TORCH_DISABLE_NATIVE_JIT": "1",
            "OMP_NUM_THREADS": spec.env.get("OMP_NUM_THREADS", "1"),
            "TMPDIR": layout.tmp_inside,
            "PYTHONPATH": os.pathsep.join([str(self.build.rank_dir), *filter(None, [spec.env.get("PYTHONPATH", "")])]),
        }
        keep_fd = None
        keeper_fds: tuple[int, ...] = ()
        if tree:
            keeper_fds = tuple(rank.ring.fd for rank in self.ranks if rank.ring is not None)
            keeper = ContainerSpec().first_pid - 1
            numbers = f"{self.devices}:{SLOTS_PER_DEVICE}:{keeper}:{','.join(map(str, keeper_fds))}"
            env["ERGO_DEVICES"] = f"{spec.device_kind}:{numbers}:{self.build.rank_dir}"
        elif channel and rank.ring is not None:
            keep_fd = rank.ring.fd
            env["ERGO_CHANNEL"] = f"{keep_fd}:{self.build.rank_dir}:{spec.device_kind}"
        if spec.device_memory:
            env["ERGO_DEVICE_MEMORY"] = str(spec.device_memory)
        return ContainerSpec(
            argv=spec.argv,
            env=env,
            cwd=spec.cwd,
            log=layout.log_inside(rank.rank),
            binds=((layout.private, Path(layout.private_mount)),),
            network=spec.network,
            keep_fd=keep_fd,
            keeper_fds=keeper_fds,
        )

    # ------------------------------------------------------------------ looking at it

    def proxy_of(self, rank: Rank) -> DeviceProxyClient:
        return self.proxies[self.placement[rank.rank]]

    def living(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.alive]

    def poll_exits(self) -> None:
        """Notes which ranks have ended."""
        for rank in self.living():
            status = rank.container.poll() if rank.container else None
            if status is not None:
                rank.exit = RankExit(rank.rank, status.code, status.signal)
                if rank.ring is not None and status.code == 0 and not status.signal:
                    # Perhaps without a word to the proxy (os._exit): others must not wait for it for ever.
                    rank.ring.mark_rank_left()
        if self.spec.pack == "node":
            self._look_at_claimants()

    def _look_at_claimants(self) -> None:
        tree = self.ranks[0].container
        if tree is None:  # of one that is being restored there are rings before it is known where
            return
        with suppress(ValueError):  # a ring that another thread is closing
            claims = {rank.rank: rank.ring.claimant for rank in self.ranks if rank.ring is not None}
            self.claimants.look(claims, tree.processes)

    def ended(self) -> list[Rank]:
        """Local ranks that have ended, those first that had no other's end as their reason; see `Blame.ended`."""
        return self._blame.ended(self.ranks)

    def dead_proxy(self) -> int | None:
        """Index of a proxy that has died, or None."""
        for index, proxy in self.proxies.items():
            if not proxy.alive:
                return index
        return None

    def step(self) -> list[int]:
        """Steps whose device work is done, per rank; see `steps`."""
        return list(self.steps().values())

    def steps(self) -> dict[int, int]:
        """The same by rank; of a job that starts its own ranks one number, see `model.manifest.steps_of`."""
        found = {rank.rank: rank.step for rank in self.ranks}
        return found if self.spec.pack == "rank" else {0: max(found.values())}

    def violations(self, ranks: Iterable[Rank]) -> list[str]:
        """Sentences about everything that a process of these living ranks holds and must not hold when it is dumped."""
        found: list[str] = []
        for rank in ranks:
            assert rank.container is not None
            found += [
                f"rank {rank.rank}: {text}" for text in inspect.violations(rank.container, shared_rings=rank.shared)
            ]
        return found

    def resident_bytes(self) -> list[int]:
        """Resident memory of every living rank's own process."""
        sizes: list[int] = []
        for rank in self.living():
            with suppress(OSError, ValueError):
                assert rank.container is not None
                fields = Path(f"/proc/{rank.container.rank_pid}/statm").read_text().split()
                sizes.append(int(fields[1]) * os.sysconf("SC_PAGE_SIZE"))
        return sizes

    # ------------------------------------------------------------------ holding, releasing, ending it

    def hold(self) -> None:
        """Stops every process of every rank (SIGSTOP): nothing of it runs until `release`."""
        self.held = True
        self._signal(self.living(), signal.SIGSTOP)

    def await_held(self, ranks: Iterable[Rank], deadline_s: float) -> None:
        """Waits until the processes of held ranks stand, those that they have started meanwhile included.

        Raises:
            RunError: one does not.
        """
        limit = time.monotonic() + min(deadline_s, HELD_S)
        for rank in ranks:
            assert rank.container is not None
            while not all(map(proc.stands, rank.container.processes())):
                if time.monotonic() > limit:
                    raise RunError(f"rank {rank.rank} could not be stopped.", code="cut.deadline")
                time.sleep(0.001)
                self._signal([rank], signal.SIGSTOP)

    def let_go(self, ranks: Iterable[Rank]) -> None:
        """Undoes `hold` for some ranks."""
        self._signal(ranks, signal.SIGCONT)

    def release(self) -> None:
        """Undoes `hold` and lets the proxies go on: the job runs as if no cut had been asked."""
        for proxy in self.proxies.values():
            with suppress(Exception):  # a dead proxy is found and reported by the monitor
                proxy.resume()
        self.held = False
        self.let_go(self.living())

    def _signal(self, ranks: Iterable[Rank], number: int) -> None:
        for rank in ranks:
            assert rank.container is not None
            for pid in rank.container.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def terminate_ranks(self, grace_s: float) -> None:
        """SIGTERM to every living rank, SIGKILL to what is left after `grace_s` seconds. The proxies stay."""
        for rank in self.living():
            assert rank.container is not None
            with suppress(ProcessLookupError):
                rank.container.signal(signal.SIGTERM)
        limit = time.monotonic() + grace_s
        while self.living() and time.monotonic() < limit:
            self.poll_exits()
            time.sleep(0.01)
        self.kill_ranks(self.ranks)

    def kill(self) -> None:
        """Ends everything of this generation at once. Idempotent."""
        self.kill_ranks(self.ranks)
        self.claimants.close()
        proxies, self.proxies = self.proxies, {}
        for proxy in proxies.values():
            proxy.kill()
        if self.volume is not None:
            self.volume.kill()
            self.volume = None

    def kill_ranks(self, ranks: Iterable[Rank]) -> None:
        """Ends some ranks at once."""
        in_parallel([lambda rank=rank: self._kill_rank(rank) for rank in ranks])

    def _kill_rank(self, rank: Rank) -> None:
        if rank.container is not None:
            rank.container.kill()
        if rank.ring is not None:
            rank.last_step = rank.step
            rank.ring.close()
            rank.ring = None

    # ------------------------------------------------------------------ restoring it

    def ring_of_ended(self, rank: Rank, unread: Path) -> None:
        """Gives a rank that has no ring of its own any more one with what it had left in it."""
        data = unread.read_bytes() if unread.exists() else b""
        rank.ring = Ring.of_ended(rank.rank, rank.last_step, data, self.build.id)

    def restore_rank(
        self, rank: Rank, tool: Criu, images: Path, unread: Path, go: Callable[[], None], deadline_s: float
    ) -> None:
        """Restores one rank; `go` blocks, with the tree complete and paused, until it may run.

        `unread` is the file with what was left in its ring, where it had let go of that.
        """

        def on_paused(container: Container) -> None:
            try:
                if rank.shared:
                    for each, ring in zip(self.ranks, Ring.shared_of(container.keeper_pid), strict=True):
                        each.ring = ring
                else:
                    rank.ring = Ring.of_process(container.rank_pid)
            except RingError:
                if not unread.exists():
                    raise
                self.ring_of_ended(rank, unread)  # it was on its way out
            go()

        rank.container = criu.restore(
            tool,
            self.build.init_binary,
            images,
            self.container_spec(rank, channel=False),
            on_paused=on_paused,
            deadline_s=deadline_s,
            mounts_of=self.volume,
        )


@contextmanager
def ended_on_error(generation: Generation) -> Iterator[Generation]:
    """Whatever goes wrong inside, nothing of the generation stays behind."""
    try:
        yield generation
    except BaseException:
        generation.kill()
        raise


def require_same_counts(counts: dict[int, dict[str, Any]]) -> None:
    """The check at load (facts/cut.md): all members of a communicator have completed the same collectives.

    Args:
        counts: per rank, sequence -> `completed`, as its proxy has loaded them.

    Raises:
        AgreementError: the checkpoint is not a consistent cut.
    """
    verify_completed(
        {sequence: {rank: comm["completed"]} for sequence, comm in by_sequence.items()}
        for rank, by_sequence in counts.items()
    )
