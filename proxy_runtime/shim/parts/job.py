"""A job's part on one node of a fleet: its life from `prepare` to `end`. Cuts of it are in `cuts`.

Operations come from several threads; one at a time changes the part. `end` waits for none of them: it takes away
what they work on.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model.ids import Step
from model.manifest import RankState
from model.runtime import AttendResult, Outcome, Progress, RestoreResult
from proxy_runtime.build import Build
from proxy_runtime.checkpoint.reader import CheckpointReader
from proxy_runtime.checkpoint.store import Store
from proxy_runtime.cut.dumped import AtHand
from proxy_runtime.device.client import Zygote
from proxy_runtime.errors import ErgoError
from proxy_runtime.process.criu_setup import Criu
from proxy_runtime.shim.generation import Generation, Rank
from proxy_runtime.shim.header import rank_states, restorable, restored_state
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.part import Endpoint, Limits, PartStatus, Phase
from proxy_runtime.shim.parts import exits
from proxy_runtime.shim.parts.cuts import PartCuts
from proxy_runtime.shim.parts.outcome import PartOutcome
from proxy_runtime.shim.parts.ports import Ports
from proxy_runtime.shim.parts.sharing import SharingWatch
from proxy_runtime.shim.parts.stopwatch import Stopwatch
from proxy_runtime.shim.parts.succession import Succession
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
        succession: to a part of a later epoch that keeps the processes.
    """

    def __init__(
        self,
        spec: RunSpec,
        layout: RunLayout,
        build: Build,
        tool: Callable[[], Criu],
        limits: Limits | None = None,
        before: PartJob | None = None,
    ) -> None:
        """`before` is the part of an earlier epoch whose processes this one is to `keep`."""
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
        self._limits = limits or Limits()
        self.cuts = PartCuts(self, self._limits)
        self._sharing = SharingWatch()
        self._phase = Phase.NEW
        self._zygote: Zygote | None = None
        self._endpoints: tuple[Endpoint, ...] = ()
        self._ports = Ports()
        self._restored: tuple[str, RestoreResult] | None = None
        self._restoration: Restoration | Succession | None = None
        self._before = before
        self.succession: Succession | None = None
        self._fresh = False
        self._failed: ErgoError | None = None  # of an operation after which only `end` is left
        self._operation = threading.RLock()
        self._outcome = PartOutcome(layout.result)
        self.over = False  # the ranks have ended, or are being ended
        self._ending = threading.Event()

    # ------------------------------------------------------------------ bringing it up

    def warm(self) -> Zygote:
        """Starts the zygote, which imports torch while the nodes agree on what to do."""
        if self._before is not None:
            return self._before.warm()
        with self.operation():
            if self._zygote is None:
                self._zygote = start_zygote(self.spec, self.build, self.layout)
            return self._zygote

    def prepare(self, host: str, *, fresh: bool, deadline_s: float) -> tuple[Endpoint, ...]:
        """See `PartClient.prepare`."""
        with self.operation():
            if self._phase is Phase.NEW:
                with self._final_on_error():
                    self._prepare(host, fresh, deadline_s)
            elif fresh != self._fresh:
                raise RunError(f"the part was prepared {'anew' if self._fresh else 'for a restore'} before.")
            return self._endpoints

    def _prepare(self, host: str, fresh: bool, deadline_s: float) -> None:
        if self._before is None:
            epoch = self.layout.epoch(self.part.epoch).create(volume=fresh)
            self.layout.set_current(epoch)
        else:
            epoch = self._before._live_generation().layout
        zygote = self.warm()
        self.generation = generation = Generation.prepare(
            self.spec, self.part.epoch, epoch, self.build, self.spec.devices
        )
        if fresh:
            generation.mount()
            generation.launch_ranks()  # they import torch while the zygote does
        fork_proxies(generation, zygote, self.layout, deadline_s)
        self._endpoints = self._ports.reserve(self.part, host)
        self._fresh = fresh
        self.set_phase(Phase.PREPARED)

    def connect(self, endpoints: Iterable[Endpoint], token: str, *, deadline_s: float) -> None:
        """See `PartClient.connect`."""
        with self.operation():
            if self._phase is Phase.NEW:
                raise RunError("the part is not prepared.", code="run.order")
            if self._phase is not Phase.PREPARED:
                return
            with self._final_on_error():
                generation = self._live_generation()
                remote = {(e.low, e.high): (e.host, e.port) for e in endpoints}
                generation.connect(remote, token or secrets.token_hex(16), deadline_s)
                self._ports.let_go()
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
        with self.operation():
            if self._restored is not None and self._restored[0] == checkpoint:
                return self._restored[1]
            self._require_connected()
            with self._final_on_error():
                reader = self._reader(checkpoint)
                at_hand = AtHand(self.layout.cuts_beside())
                self._restoration = restoration = Restoration(self._live_generation(), reader, self.tool(), at_hand)
                counts = restoration.bring(deadline_s=deadline_s)
                self.event("brought", **Counter(restoration.origins))
                saved = [reader.manifest.header.ranks[rank] for rank in self.part.ranks]
                return self._paused(checkpoint, saved, counts)

    def keep(self, cut: int, checkpoint: str | None = None, *, deadline_s: float) -> RestoreResult:
        """See `PartClient.keep`."""
        with self.operation():
            source = f"cut {cut} {checkpoint or ''}".strip()
            if self._restored is not None and self._restored[0] == source:
                return self._restored[1]
            self._require_connected()
            if self._before is None:
                raise RunError("no part is here whose processes could be kept.", code="run.order")
            with self._final_on_error():
                reader = None if checkpoint is None else self._reader(checkpoint)
                succession = Succession(self._before, self, cut, reader)
                self._restoration = self._before.succession = succession
                counts = succession.bring(deadline_s=deadline_s)
                return self._paused(source, succession.saved, counts)

    def _reader(self, checkpoint: str) -> CheckpointReader:
        return restorable(self.open_store().read(checkpoint, self.spec.job_id), self.spec, self.build)

    def _paused(self, source: str, saved: Iterable[RankState], counts: dict[int, dict[str, Any]]) -> RestoreResult:
        assert self._restoration is not None
        states = tuple(restored_state(state, counts[state.rank]) for state in saved)
        self._restored = source, RestoreResult(states, dict(self._restoration.timings))
        self.set_phase(Phase.PAUSED)
        return self._restored[1]

    def go(self) -> None:
        """See `PartClient.go`."""
        with self.operation():
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
        if self._outcome.result is not None or self._phase in (Phase.NEW, Phase.PAUSED) or self._before is not None:
            return  # ranks that stay are the part's before it until they are taken: what fails is called off there
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

    def _conclude(self, result: AttendResult, *, keep: bool = True) -> None:
        if self._outcome.settle(result, keep=keep):
            self.event("ended", outcome=result.outcome, exits=[exits.sentence(exit) for exit in result.exits])

    # ------------------------------------------------------------------ the epoch after it

    def successor(self, spec: RunSpec) -> PartJob:
        """The part of a later epoch that is to `keep` the processes.

        Raises:
            RunError: none of its ranks is here, or they hang together.
        """
        part = PartJob(spec, self.layout, self.build, self.tool, self._limits, before=self)
        if not {*part.part.ranks} & {*self.part.ranks} or spec.pack != "rank":
            raise RunError("processes are kept of ranks that stay on their node.", code="run.bad-spec")
        return part

    def hand_over(self, take: Callable[[], None]) -> Zygote | None:
        """The processes become another part's by `take`, and this one is over. The zygote goes with them."""
        progress = self.progress()
        self._ending.set()
        self.over = True
        self.delivered.stop()
        take()
        self.cuts.close()
        self.set_phase(Phase.ENDED)
        self._conclude(AttendResult(Outcome.STOPPED, progress), keep=False)
        zygote, self._zygote = self._zygote, None
        return zygote

    def lose(self, why: str) -> None:
        """It cannot go on as it was; the job goes back to its newest checkpoint."""
        self._give_up(Outcome.LOST, [], why)

    def inherit(self, zygote: Zygote | None) -> None:
        """The part before is over, and this one has its processes."""
        self._zygote, self._before = zygote, None

    # ------------------------------------------------------------------ looking at it

    @property
    def phase(self) -> Phase:
        """Where it stands."""
        return self._phase

    @property
    def result(self) -> AttendResult | None:
        """How it ended, once it has."""
        return self._outcome.result

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
        if self._outcome.result is not None and not (generation and generation.ranks):  # a successor has them
            return self._outcome.result.progress
        step = min(generation.step(), default=0) if generation is not None else 0
        device_ms = int(self.delivered.ms * len(self.part.local_devices))
        return Progress(Step(step), device_ms, sharing=self._sharing.found)

    def status(self) -> PartStatus:
        """See `PartClient.status`."""
        generation = self.generation
        if generation is not None and self._phase is Phase.RUNNING and self._outcome.result is None:
            with self.try_operation() as free:  # a proxy that is stopping for a cut is left alone
                if free:
                    self._sharing.look(generation)
        progress = self.progress()
        ranks = generation.ranks if generation is not None else []
        living = [rank for rank in ranks if rank.alive]
        over = self._outcome.result is not None and self._phase is Phase.RUNNING
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
            result=self._outcome.result,
        )

    def states(self, counts: dict[int, dict[str, Any]]) -> tuple[RankState, ...]:
        """Where the local ranks stand, by what their proxies have counted."""
        return rank_states(self._live_generation(), counts)

    def wait(self, timeout_s: float) -> AttendResult | None:
        """The result as soon as there is one; None after `timeout_s` seconds."""
        return self._outcome.wait(timeout_s)

    # ------------------------------------------------------------------ the end

    def end(self, grace_s: float) -> AttendResult:
        """Ends everything. Idempotent; returns how the part had ended, or that it was stopped.

        What a successor has ready to go on is the successor's.
        """
        if self.succession is not None:
            self.succession.take()
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
            self._ports.let_go()
            self._conclude(AttendResult(Outcome.STOPPED, self.progress()))
        finally:
            self._operation.release()
        assert self._outcome.result is not None
        return self._outcome.result

    # ------------------------------------------------------------------ helpers

    @contextmanager
    def operation(self) -> Iterator[None]:
        """One operation at a time, and none any more once the part is being ended or cannot be used."""
        with self._operation:
            if self._failed is not None:  # whoever asks again is to hear why
                raise RunError(self._failed.message, code=self._failed.code, remedy=self._failed.remedy)
            if self._ending.is_set():
                raise RunError("the part is being ended.", code="run.ended")
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

    def _require_connected(self) -> None:
        if self._phase is not Phase.CONNECTED or self._fresh:
            raise RunError(f"a part that is {self._phase} cannot be restored.", code="run.order")

    def _live_generation(self) -> Generation:
        if self.generation is None:
            raise RunError("the part is not prepared.", code="run.order")
        return self.generation
