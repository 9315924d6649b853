"""What a node remembers of its jobs, on disk, so that an agent that starts again finds what it owns.

<node>/parts/<job>-e<epoch>.json     a part that is here, from before its shim is started until it has been ended
<node>/parts/<job>-e<epoch>.tree     files of the volume that it was restored with, against which commits are made
<node>/epochs/<job>                  the highest epoch seen of a job, and up to which all is ended
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson

from model.codec import from_json, to_json
from model.errors import ModelError
from model.ids import CheckpointId, Epoch, JobId
from model.job_spec import JobSpec
from model.manifest import RankState, Tree
from model.placement import Placement
from model.shape import Shape


@dataclass(frozen=True, slots=True)
class PartRecord(Shape):
    """A job's part on this node.

    Attributes:
        started: its ranks were started, or restored: where it is gone since, it is lost.
        restored: where its ranks stood when they had been restored.
        checkpoint: what it was restored from; None for a fresh start.
        build_id: of the runtime.
        argv, env, cwd: as every manifest tells them; `env` has no secrets.
        network: of the ranks.
        first_run: of the job's workflow when it began: a job with the same id and another first run is another.
        home: the epoch whose shim and run directory it has with the processes; None for its own.
    """

    job: JobId
    epoch: Epoch
    spec: JobSpec
    placement: Placement
    build_id: str
    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str] = field(default_factory=dict[str, str])
    network: str = "host"
    checkpoint: CheckpointId | None = None
    started: bool = False
    restored: tuple[RankState, ...] = ()
    first_run: str = ""
    home: Epoch | None = None


@dataclass(frozen=True, slots=True)
class Epochs(Shape):
    """What is known of a job's epochs: the highest one seen, and the one up to which everything is ended.

    Attributes:
        void: epochs above `stopped` that never came to count, and never will.
    """

    seen: Epoch = field(default_factory=lambda: Epoch(0))
    stopped: Epoch = field(default_factory=lambda: Epoch(0))
    void: tuple[Epoch, ...] = ()

    def over(self, epoch: Epoch) -> bool:
        """Whether nothing of this epoch may start any more."""
        return epoch <= self.stopped or epoch in self.void


class Ledger:
    """The files. Thread-safe; only one process has them (`lease.lock_directory`)."""

    def __init__(self, directory: Path) -> None:
        self._parts = directory / "parts"
        self._epochs = directory / "epochs"
        for folder in (self._parts, self._epochs):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = threading.Lock()
        self._known: dict[JobId, Epochs] = {}

    def epochs(self, job: JobId) -> Epochs:
        """What is known of a job's epochs."""
        with self._lock:
            return self._read(job)

    def note_seen(self, job: JobId, epoch: Epoch) -> None:
        """Remembers that an epoch exists."""
        with self._lock:
            known = self._read(job)
            if epoch > known.seen:
                self._write(job, replace(known, seen=epoch))

    def note_stopped(self, job: JobId, epoch: Epoch) -> None:
        """Remembers that nothing of the job up to this epoch may start any more."""
        with self._lock:
            known = self._read(job)
            if epoch > known.stopped:
                void = tuple(other for other in known.void if other > epoch)
                self._write(job, Epochs(seen=max(known.seen, epoch), stopped=epoch, void=void))

    def note_void(self, job: JobId, epoch: Epoch) -> None:
        """Remembers that nothing of this one epoch may start any more; those before it go on."""
        with self._lock:
            known = self._read(job)
            if not known.over(epoch):
                self._write(job, replace(known, void=(*known.void, epoch)))

    def forget_epochs(self) -> None:
        """Another incarnation begins: what was stopped on the one before says nothing."""
        with self._lock:
            self._known.clear()
            for path in self._epochs.iterdir():
                path.unlink()

    def parts(self) -> list[PartRecord]:
        """All parts that are here."""
        found: list[PartRecord] = []
        for path in sorted(self._parts.glob("*.json")):
            try:
                found.append(from_json(PartRecord, path.read_bytes()))
            except (OSError, ModelError):
                continue  # being removed; or of a build that wrote it otherwise, whose shim nobody here can speak to
        return found

    def put(self, record: PartRecord) -> None:
        """Writes a part's record; durable before anything of it is started."""
        _replace(self._path(record.job, record.epoch), to_json(record))

    def put_base(self, job: JobId, epoch: Epoch, tree: bytes) -> None:
        """Keeps the list of files that an epoch began with: the checkpoint it comes from may be removed meanwhile."""
        _replace(self._path(job, epoch).with_suffix(".tree"), tree)

    def copy_base(self, job: JobId, source: Epoch, epoch: Epoch) -> None:
        """The same for an epoch that goes on in the directory of another one."""
        with suppress(FileNotFoundError):
            self.put_base(job, epoch, self._path(job, source).with_suffix(".tree").read_bytes())

    def base(self, job: JobId, epoch: Epoch) -> Tree | None:
        """What `put_base` has kept; None where the epoch began with nothing."""
        try:
            return Tree.model_validate_json(self._path(job, epoch).with_suffix(".tree").read_bytes())
        except FileNotFoundError:
            return None

    def drop(self, job: JobId, epoch: Epoch) -> None:
        """Removes a part's record, after all of it has been ended."""
        for path in (self._path(job, epoch), self._path(job, epoch).with_suffix(".tree")):
            path.unlink(missing_ok=True)

    def _path(self, job: JobId, epoch: Epoch) -> Path:
        return self._parts / f"{job}-e{int(epoch)}.json"

    def _read(self, job: JobId) -> Epochs:
        if job not in self._known:
            try:
                self._known[job] = from_json(Epochs, (self._epochs / job).read_bytes())
            except FileNotFoundError:
                return Epochs()
        return self._known[job]

    def _write(self, job: JobId, epochs: Epochs) -> None:
        _replace(self._epochs / job, orjson.dumps(_plain(epochs)))
        self._known[job] = epochs


def _plain(epochs: Epochs) -> dict[str, object]:
    """Without what an agent of an older build does not know, where that says nothing."""
    found: dict[str, object] = {"seen": int(epochs.seen), "stopped": int(epochs.stopped)}
    return {**found, "void": [int(epoch) for epoch in epochs.void]} if epochs.void else found


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}.new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
