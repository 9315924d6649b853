"""A job's part on one node of a fleet: its life from `prepare` to `end`. Cuts of it are in `cuts`.

Operations come from several threads; one at a time changes the part. `end` waits for none of them: it takes away
what they work on.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from model.codec import to_json
from model.ids import Step
from model.manifest import RankState
from model.runtime import AttendResult, Outcome, Progress, RestoreResult
from proxy_runtime.build import Build
from proxy_runtime.checkpoint.store import Store
from proxy_runtime.cut.dumped import AtHand
from proxy_runtime.device.client import Zygote
from proxy_runtime.device.wiring import address_of, listening_pairs, reserve
from proxy_runtime.errors import ErgoError
from proxy_runtime.process.criu_setup import Criu
from proxy_runtime.shim.generation import Generation, Rank
from proxy_runtime.shim.header import host_class, numerics_class, rank_states
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.part import Endpoint, Limits, PartStatus, Phase
from proxy_runtime.shim.parts import exits
from proxy_runtime.shim.parts.cuts import PartCuts
from proxy_runtime.shim.parts.sharing import SharingWatch
from proxy_runtime.shim.parts.stopwatch import Stopwatch
from proxy_runtime.shim.restoring import Restoration
from proxy_runtime.shim.spec import NodePart, RunError, RunSpec
from proxy_runtime.shim.zygotes import fork_proxies, start_zygote

TERMINATE_GRACE_S = 5.0
KILL_PERIOD_S = 0.2


class PartJob:
    """Owns a part's processes.

    Attributes:
        on_event: told what happens to the part.
        cuts: the operations of a cut.
    """

    def __init__(
        self, spec: RunSpec, layout: RunLayout, build: Build, tool: Callable[[], Criu], limits: Limits | None = None
    ) -> None:
        if spec.part is None:
            raise RunError("the specification names no part of a job.", code="run.bad-spec")
        self.spec = spec
        self.part: NodePart = spec.part
        self.layout = layout
        self.build = build
        self.tool = tool
        self.on_event: Callable[[dict[str, Any]], None] = lambda _: None
        self.delivered = Stopwatch()
        self.generation: Generation | None = None
        self.cuts = PartCuts(self, limits or Limits())
        self._sharing = SharingWatch()
        self._phase = Phase.NEW
        self._zygote: Zygote | None = None
        self._endpoints: tuple[Endpoint, ...] = ()
        self._reserved: list[socket.socket] = []  # keep the ports of the endpoints until the proxies listen there
        self._restored: tuple[str, RestoreResult] | None = None
        self._restoration: Restoration | None = None
        self._fresh = False
        self._failed: ErgoError | None = None  # of an operation after which only `end` is left
        self._operation = threading.RLock()
        self._changed = threading.Condition()
        self._result: AttendResult | None = None
        self.over = False  # the ranks have ended, or are being ended
        self._ending = threading.Event()

    # ------------------------------------------------------------------ bringing it up

    def warm(self) -> Zygote:
        """Starts the zygote, which imports torch while the nodes agree on what to do."""
        with self.operation("warm"):
            if self._zygote is None:
                self._zygote = start_zygote(self.spec, self.build, self.layout)
            return self._zygote

    def prepare(self, host: str, *, fresh: bool, deadline_s: float) -> tuple[Endpoint, ...]:
        """See `PartClient.prepare`."""
        with self.operation("prepare"):
            if self._phase is Phase.NEW:
                with self._final_on_error():
                    self._prepare(host, fresh, deadline_s)
            elif fresh != self._fresh:
                raise RunError(f"the part was prepared {'anew' if self._fresh else 'for a restore'} before.")
            return self._endpoints

    def _prepare(self, host: str, fresh: bool, deadline_s: float) -> None:
        epoch = self.layout.epoch(self.part.epoch).create(volume=fresh)
        self.layout.set_current(epoch)
        zygote = self.warm()
        self.generation = generation = Generation.prepare(
            self.spec, self.part.epoch, epoch, self.build, self.spec.devices
        )
        if fresh:
            generation.mount()
            generation.launch_ranks()  # they import torch while the zygote does
        fork_proxies(generation, zygote, self.layout, deadline_s)
        pairs = listening_pairs(self.part.local_devices, self.part.device_of_rank)
        self._reserved = [reserve(host) for _ in pairs]
        self._endpoints = tuple(
            Endpoint(*pair, host, address_of(held)[1]) for pair, held in zip(pairs, self._reserved, strict=True)
        )
        self._fresh = fresh
        self.set_phase(Phase.PREPARED)

    def connect(self, endpoints: Iterable[Endpoint], token: str, *, deadline_s: float) -> None:
        """See `PartClient.connect`."""
        with self.operation("connect"):
            if self._phase is Phase.NEW:
                raise RunError("the part is not prepared.", code="run.order")
            if self._phase is not Phase.PREPARED:
                return
            with self._final_on_error():
                generation = self._live_generation()
                remote = {(e.low, e.high): (e.host, e.port) for e in endpoints}
                generation.connect(remote, token or secrets.token_hex(16), deadline_s)
                self._let_go_of_ports()
                if not self._fresh:
                    self.set_phase(Phase.CONNECTED)
                    return
                try:
                    generation.attach()
                    self._run(generation.start)
                except (ErgoError, OSError):
                    if not self.over:  # else a rank has failed before its first device call, and `result` says so
                        raise
                    self.set_phase(Phase.RUNNING)

    def restore(self, checkpoint: str, *, deadline_s: float) -> RestoreResult:
        """See `PartClient.restore`."""
        with self.operation("restore"):
            if self._restored is not None and self._restored[0] == checkpoint:
                return self._restored[1]
            if self._phase is not Phase.CONNECTED or self._fresh:
                raise RunError(f"a part that is {self._phase} cannot be restored.", code="run.order")
            with self._final_on_error():
                reader = self.open_store().read(checkpoint, self.spec.job_id)
                reader.require(
                    build_id=self.build.id,
                    numerics=numerics_class(self.build, self.spec.device_kind, self.spec.threads),
                    cpu_features=host_class().cpu_features,
                )
                at_hand = AtHand(self.layout.cuts_beside())
                self._restoration = restoration = Restoration(self._live_generation(), reader, self.tool(), at_hand)
                counts = restoration.bring(deadline_s=deadline_s)
                self.event("brought", **Counter(restoration.origins))
                header = reader.manifest.header
                states = [restored_state(header.ranks[rank], counts[rank]) for rank in self.ranks]
                self._restored = checkpoint, RestoreResult(tuple(states), dict(restoration.timings))
                self.set_phase(Phase.PAUSED)
                return self._restored[1]

    def go(self) -> None:
        """See `PartClient.go`."""
        with self.operation("go"):
            if self._phase is Phase.PAUSED and self._restoration is not None:
                with self._final_on_error():
                    self._run(self._restoration.go)
            elif self._phase in (Phase.NEW, Phase.PREPARED, Phase.CONNECTED):
                raise RunError(f"a part that is {self._phase} cannot run.", code="run.order")

    def _run(self, call: Callable[[], None]) -> None:
        call()
        if not self.over:
            self.delivered.start()
        self.set_phase(Phase.RUNNING)

    # ------------------------------------------------------------------ what the monitor sees

    def poll(self) -> None:
        """Notices exits, dead proxies and the watchdog's hour. Called again and again from one thread."""
        generation = self.generation
        if generation is None or self._ending.is_set():
            return
        self.cuts.watch()
        if self._result is not None or self._phase in (Phase.NEW, Phase.PAUSED):
            return
        dead = generation.dead_proxy()
        generation.poll_exits()
        ended = generation.ended()
        bad = [rank for rank in ended if rank.exit is not None and rank.exit.code != 0]
        if dead is not None:
            self._give_up(Outcome.LOST, bad, f"the device proxy of device {dead} died")
        elif bad:
            killed = generation.claimants.killed
            lost = killed or any(rank.exit and rank.exit.signal for rank in bad) or exits.lost_peer(generation)
            sentence = "; ".join(rank.exit.sentence for rank in bad if rank.exit)
            if killed is not None:
                sentence += f", after {killed.sentence}"
            self._give_up(Outcome.LOST if lost else Outcome.FAILED, bad, sentence)
        elif len(ended) == sum(rank.has_tree for rank in generation.ranks):
            self.over = True
            self.delivered.stop()
            self._finish(Outcome.COMPLETED, ended)

    def _give_up(self, outcome: Outcome, bad: Sequence[Rank], sentence: str) -> None:
        """The other ranks are ended. The proxies stay: ranks of other nodes wait for them, and need not fail."""
        generation = self._live_generation()
        self.over = True
        self.delivered.stop()
        named = [*bad, *(rank for rank in generation.ranks if rank.exit is not None and rank.exit.code == 0)]
        ended = [(rank.rank, rank.exit) for rank in named]
        self.event("failed", outcome=outcome, reason=sentence)
        self.cuts.abandon()
        for rank in generation.ranks:
            if rank.ring is not None:
                rank.ring.mark_proxy_gone()
        generation.terminate_ranks(TERMINATE_GRACE_S)
        self._sharing.look(generation, now=True)
        found = tuple(exits.describe(generation.layout, rank, exit) for rank, exit in ended if exit is not None)
        self._conclude(AttendResult(outcome, self.progress(), found))

    def _finish(self, outcome: Outcome, ranks: Sequence[Rank]) -> None:
        generation = self._live_generation()
        self._sharing.look(generation, now=True)
        found = [exits.describe(generation.layout, rank.rank, rank.exit) for rank in ranks if rank.exit is not None]
        self._conclude(AttendResult(outcome, self.progress(), tuple(found)))

    def _conclude(self, result: AttendResult) -> None:
        with self._changed:
            if self._result is not None:
                return
            with suppress(OSError):  # a full disk: it is told over the socket
                fresh = self.layout.result.with_suffix(".new")
                fresh.write_bytes(to_json(result))
                fresh.rename(self.layout.result)
            self._result = result
            self._changed.notify_all()
        self.event("ended", outcome=result.outcome, exits=[exits.sentence(exit) for exit in result.exits])

    # ------------------------------------------------------------------ looking at it

    @property
    def ranks(self) -> list[int]:
        """Numbers of the local ranks."""
        local = self.part.local_devices
        return [rank for rank, device in enumerate(self.part.device_of_rank) if device in local]

    @property
    def phase(self) -> Phase:
        """Where it stands."""
        return self._phase

    @property
    def result(self) -> AttendResult | None:
        """How it ended, once it has."""
        return self._result

    def set_phase(self, phase: Phase) -> None:
        """Notes where it stands, and says so."""
        self._phase = phase
        self.event("phase", phase=phase)

    def event(self, name: str, **more: Any) -> None:
        """Tells whoever listens."""
        self.on_event({"event": name, "at_ms": time.time_ns() // 1_000_000, "epoch": self.part.epoch, **more})

    def progress(self) -> Progress:
        """Step and device time."""
        generation = self.generation
        step = min(generation.step()) if generation is not None else 0
        device_ms = int(self.delivered.ms * len(self.part.local_devices))
        return Progress(Step(step), device_ms, sharing=self._sharing.found)

    def status(self) -> PartStatus:
        """See `PartClient.status`."""
        generation = self.generation
        if generation is not None and self._phase is Phase.RUNNING and self._result is None:
            with self.try_operation() as free:  # a proxy that is stopping for a cut is left alone
                if free:
                    self._sharing.look(generation)
        progress = self.progress()
        ranks = generation.ranks if generation is not None else []
        living = [rank for rank in ranks if rank.alive]
        over = self._result is not None and self._phase is Phase.RUNNING
        return PartStatus(
            phase=Phase.ENDED if over else self._phase,
            epoch=self.part.epoch,
            cut=self.cuts.number,
            steps=generation.steps() if generation else {},
            device_ms=progress.device_ms,
            living=tuple(rank.rank for rank in living),
            rank_pids={rank.rank: rank.container.rank_pid for rank in living if rank.container is not None},
            proxy_pids={device: proxy.pid for device, proxy in generation.proxies.items()} if generation else {},
            attached=bool(ranks) and all(rank.attached for rank in ranks),
            sharing=progress.sharing,
            result=self._result,
        )

    def states(self, counts: dict[int, dict[str, Any]]) -> tuple[RankState, ...]:
        """Where the local ranks stand, by what their proxies have counted."""
        return rank_states(self._live_generation(), counts)

    def wait(self, timeout_s: float) -> AttendResult | None:
        """The result as soon as there is one; None after `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._result is not None, timeout_s)
            return self._result

    # ------------------------------------------------------------------ the end

    def end(self, grace_s: float) -> AttendResult:
        """Ends everything. Idempotent; returns how the part had ended, or that it was stopped."""
        self._ending.set()
        self.over = True
        self.delivered.stop()
        if self._restoration is not None:
            self._restoration.refuse()
        generation = self.generation
        if generation is not None and grace_s > 0 and self._phase is Phase.RUNNING:
            generation.terminate_ranks(grace_s)
        while True:  # what an operation under way starts meanwhile goes too
            if self.generation is not None:
                self.generation.kill()
            if self._operation.acquire(timeout=KILL_PERIOD_S):
                break
        try:
            if self.generation is not None:
                self.generation.kill()
            if self._zygote is not None:
                self._zygote.close()
                self._zygote = None
            self._let_go_of_ports()
            self._conclude(AttendResult(Outcome.STOPPED, self.progress()))
        finally:
            self._operation.release()
        assert self._result is not None
        return self._result

    # ------------------------------------------------------------------ helpers

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """One operation at a time, and none any more once the part is being ended or cannot be used."""
        with self._operation:
            if self._ending.is_set():
                raise RunError("the part is being ended.", code="run.ended")
            if self._failed is not None:
                raise RunError(
                    f"'{name}' is too late: {self._failed.message}",
                    code=self._failed.code,
                    remedy="End the part; the job goes on in another epoch.",
                )
            yield

    @contextmanager
    def try_operation(self) -> Iterator[bool]:
        """As `operation`, but without waiting: False where another one is under way or the part is being ended."""
        if self._ending.is_set() or not self._operation.acquire(blocking=False):
            yield False
            return
        try:
            yield True
        finally:
            self._operation.release()

    def open_store(self) -> Store:
        """The node's store, as the tenant sees it."""
        return Store.open(Path(self.spec.checkpoint_dir), self.part.tenant, create=False)

    @contextmanager
    def _final_on_error(self) -> Iterator[None]:
        """After an error while the part is brought up nothing of it stays but its directory."""
        try:
            yield
        except BaseException as error:
            known = error if isinstance(error, ErgoError) else RunError(f"{type(error).__name__}: {error}")
            self._failed = known
            if self._restoration is not None:
                self._restoration.refuse()
            if self.generation is not None:
                self.generation.kill()
            self.event("failed", reason=known.message)
            raise

    def _let_go_of_ports(self) -> None:
        for held in self._reserved:
            held.close()
        self._reserved = []

    def _live_generation(self) -> Generation:
        if self.generation is None:
            raise RunError("the part is not prepared.", code="run.order")
        return self.generation


def restored_state(saved: RankState, counts: dict[str, Any]) -> RankState:
    """State of a rank as it was saved, with its counts as they were loaded."""
    loaded = {
        comm.name: comm.model_copy(
            update={"contributed": counts[comm.name]["contributed"], "completed": counts[comm.name]["completed"]}
        )
        for comm in saved.communicators
        if comm.name in counts
    }
    return saved.model_copy(update={"communicators": tuple(loaded.values())})
