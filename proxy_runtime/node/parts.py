"""The parts of jobs that are on a node now, and following one until it ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import structlog

from model.ids import Epoch, JobId, Step
from model.manifest import RankState
from model.records import JobOnNode
from model.runtime import AttendResult, Outcome, Progress, RuntimeCode
from proxy_runtime.node.ledger import Ledger, PartRecord
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.part import Endpoint, PartStatus, Phase
from proxy_runtime.shim.part_client import PartClient
from proxy_runtime.shim.spec import RunError

REPORT_S = 1.0
GONE = "run.shim-gone"

_log = structlog.stdlib.get_logger(__name__)


class Part:
    """One job's part in one epoch, as the agent knows it. Thread-safe."""

    def __init__(self, record: PartRecord, client: PartClient, ledger: Ledger) -> None:
        self.record = record
        self.client = client
        self.endpoints: tuple[Endpoint, ...] | None = None
        self.connected = False  # its proxies have met those of the other nodes
        self.ended = False  # by `stop` or a higher epoch
        self._ledger = ledger
        self._lock = threading.Lock()
        self._attached = 0
        self._unattended_since = time.monotonic()
        self._progress = Progress(Step(0), 0)

    @property
    def job(self) -> JobId:
        return self.record.job

    @property
    def epoch(self) -> Epoch:
        return self.record.epoch

    @property
    def home(self) -> Epoch:
        """The epoch whose run directory it has: that of the first one that had its processes."""
        return self.record.home or self.record.epoch

    @property
    def progress(self) -> Progress:
        """As it was last heard of."""
        return self._progress

    @property
    def on_node(self) -> JobOnNode:
        """For the node's record."""
        return JobOnNode(
            job=self.job, epoch=self.epoch, step=self._progress.step, device_ms=max(0, self._progress.device_ms)
        )

    @property
    def unattended_s(self) -> float:
        """Seconds since the last `attend` has let go; 0 while there is one."""
        with self._lock:
            return 0.0 if self._attached else time.monotonic() - self._unattended_since

    @contextmanager
    def attended(self) -> Iterator[None]:
        """While somebody waits for the part's end."""
        with self._lock:
            self._attached += 1
        try:
            yield
        finally:
            with self._lock:
                self._attached -= 1
                self._unattended_since = time.monotonic()

    def become(self, record: PartRecord) -> None:
        """Replaces the record of a part that has not started."""
        with self._lock:
            if record != self.record:
                self.record = record
                self._ledger.put(record)

    def mark_started(self, restored: tuple[RankState, ...] = ()) -> None:
        """From now on the part is lost where its shim is gone."""
        with self._lock:
            self.record = replace(self.record, started=True, restored=restored)
            self._ledger.put(self.record)

    def follow(self, report: Callable[[Progress], None]) -> AttendResult:
        """Waits until the ranks have ended; reports about once a second. What `report` raises goes through.

        Raises:
            RunError: the shim answers with an error that is not about its end.
        """
        with self.attended():
            while True:
                try:
                    result = self.client.wait(REPORT_S)
                    if result is None:
                        self.look()
                except RunError as error:
                    if error.code == GONE:
                        return self._aftermath()
                    if error.code != RuntimeCode.DEADLINE:
                        raise
                    # It hangs, or the machine is overloaded: as long as it lives, so does the job.
                    _log.warning("a shim does not answer", job=str(self.job), epoch=int(self.epoch), error=str(error))
                    result = None
                if result is not None:
                    self._progress = result.progress
                    return result if not self.ended else replace(result, outcome=Outcome.STOPPED)
                report(self._progress)

    def look(self) -> PartStatus:
        """Asks the shim how it goes, and remembers it."""
        status = self.client.status()
        step, device_ms = Step(max(0, status.step)), max(0, status.device_ms)
        self._progress = Progress(step, device_ms, status.loss, status.sharing)
        return status

    def _aftermath(self) -> AttendResult:
        """The shim is gone: ended by us, or with a result on disk, or lost."""
        result = None if self.ended else self.client.result()
        if self.ended or self._ledger.epochs(self.job).over(self.epoch):
            return AttendResult(Outcome.STOPPED, self._progress)
        return result or AttendResult(Outcome.LOST, self._progress)

    def go(self) -> bool:
        """Lets the ranks run, where they are paused. False where they never will.

        Raises:
            RunError: `run.shim-gone`, or the shim did not answer in time.
        """
        try:
            if self.look().phase is Phase.PAUSED:
                self.client.go()
        except RunError as error:
            if error.code in (GONE, RuntimeCode.DEADLINE):
                raise
            _log.error(
                "a part that was restored does not run", job=str(self.job), epoch=int(self.epoch), error=str(error)
            )
            return False
        return True

    def freeze(self, frozen: bool) -> None:
        """Stops the processes of all ranks, or lets them go on; proxies stand still without them."""
        with suppress(RunError):
            status = self.client.status()
            if status.phase is not Phase.RUNNING:
                return  # a cut or a restore holds them already
            for pid in status.rank_pids.values():
                _signal_tree(pid, signal.SIGSTOP if frozen else signal.SIGCONT)


class Parts:
    """All parts of a node. Thread-safe.

    Args:
        runs_dir: where their run directories are.
        ledger: what the node remembers.
    """

    def __init__(self, runs_dir: Path, ledger: Ledger) -> None:
        self.runs_dir = runs_dir
        self._ledger = ledger
        self._lock = threading.Lock()
        self._locks: defaultdict[JobId, threading.RLock] = defaultdict(threading.RLock)
        self._parts = {(record.job, record.epoch): self._of(record) for record in ledger.parts()}

    def lock(self, job: JobId) -> threading.RLock:
        """Held by whoever makes or ends parts of a job."""
        return self._locks[job]

    def all(self) -> list[Part]:
        """Every part that is here."""
        with self._lock:
            return list(self._parts.values())

    def of_job(self, job: JobId) -> list[Part]:
        """The parts of a job, oldest epoch first."""
        return sorted((part for part in self.all() if part.job == job), key=lambda part: part.epoch)

    def get(self, job: JobId, epoch: Epoch) -> Part | None:
        """The part of one epoch."""
        with self._lock:
            return self._parts.get((job, epoch))

    def add(self, record: PartRecord) -> Part:
        """Remembers a part, durably, before anything of it is started."""
        self._ledger.put(record)
        part = self._of(record)
        with self._lock:
            self._parts[record.job, record.epoch] = part
        return part

    def end(self, part: Part, grace_s: float) -> None:
        """Ends everything of a part, proves that nothing is left, and forgets it.

        Raises:
            RunError: something does not end; the part is then still known.
        """
        part.ended = True
        part.client.end(grace_s)
        self._ledger.drop(part.job, part.epoch)
        with self._lock:
            self._parts.pop((part.job, part.epoch), None)

    def strangers(self) -> list[RunLayout]:
        """Run directories that no record tells of."""
        known = {(str(part.job), int(part.home)) for part in self.all()}
        found = RunLayout.parts_in(self.runs_dir)
        return [layout for layout, epoch in found if (layout.job_id, epoch) not in known]

    def _of(self, record: PartRecord) -> Part:
        layout = RunLayout.of_part(self.runs_dir, record.job, record.home or record.epoch)
        return Part(record, PartClient(layout, record.epoch), self._ledger)


def _signal_tree(pid: int, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)
