"""Where the files of a job's processes are on a node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from proxy_runtime.home import ergo_home

# Inside a rank's mount namespace the private directory of its job is always here, whatever node it is on:
# the path is in its process image. Short, because UNIX socket paths end at 107 bytes.
PRIVATE_ROOT = "/run/ergo"


@dataclass(frozen=True, slots=True)
class EpochLayout:
    """Directories of one epoch of a job, and of those after it that have its processes still."""

    root: Path
    job_id: str

    @property
    def volume(self) -> Path:
        """All files of the job that a checkpoint takes along: `upper` and `private`."""
        return self.root / "volume"

    @property
    def upper(self) -> Path:
        """Overlay upper directory: what the job changed in its directory since its submission."""
        return self.volume / "directory"

    @property
    def work(self) -> Path:
        """Overlay work directory (kernel scratch)."""
        return self.root / "work"

    @property
    def private(self) -> Path:
        """Logs and temporary files of the ranks; mounted at `private_mount`."""
        return self.volume / "private"

    @property
    def private_mount(self) -> str:
        return f"{PRIVATE_ROOT}/{self.job_id}"

    def log(self, rank: int) -> Path:
        """Standard output and error of a rank, as the host sees the file."""
        return self.private / "logs" / f"rank-{rank}.log"

    def log_inside(self, rank: int) -> str:
        """The same file as the rank sees it."""
        return f"{self.private_mount}/logs/rank-{rank}.log"

    @property
    def tmp_inside(self) -> str:
        return f"{self.private_mount}/tmp"

    def proxy_log(self, device: int) -> Path:
        return self.root / f"proxy-{device}.log"

    def scratch(self, name: str) -> Path:
        """A directory for files of a checkpoint on its way to or from the store, mode 0700."""
        path = self.root / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def cut(self, epoch: int, number: int) -> Path:
        """Files of a cut, as `proxy_runtime.cut.dumped` says; the directory as that of `scratch`."""
        return self.scratch(f"cut-{epoch}-{number}")

    def restored(self, epoch: int) -> Path:
        """Files that ranks are restored from."""
        return self.root / f"restore-{epoch}"

    def ahead(self, epoch: int) -> Path:
        """Files that `proxy_runtime.shim.ahead` has brought for them."""
        return self.root / f"ahead-{epoch}"

    def undo(self, epoch: int) -> Path:
        """What the job's directory was before ranks came into it that were elsewhere."""
        return self.root / f"undo-{epoch}"

    def create(self, *, volume: bool = True) -> EpochLayout:
        """Makes the directories; without those of the volume when a checkpoint will bring them."""
        wanted = [self.root, self.work]
        if volume:
            wanted += [self.upper, self.private / "logs", self.private / "tmp"]
        for path in wanted:
            path.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)
        os.makedirs(self.private_mount, exist_ok=True)
        return self


@dataclass(frozen=True, slots=True)
class RunLayout:
    """The run directory of a job on this node."""

    root: Path
    job_id: str

    @classmethod
    def of(cls, job_id: str) -> RunLayout:
        """Of a job that `ergo run` has started."""
        return cls(ergo_home() / "runs" / job_id, job_id)

    @classmethod
    def of_part(cls, runs_dir: Path, job_id: str, epoch: int) -> RunLayout:
        """Of a part of a job of a fleet, in one epoch."""
        return cls(runs_dir / f"{job_id}-e{epoch}", job_id)

    @classmethod
    def parts_in(cls, runs_dir: Path) -> Iterator[tuple[RunLayout, int]]:
        """All parts of a node that have a run directory, with their epochs; their shims may be gone."""
        for path in sorted(runs_dir.glob("*-e*/run.json")):
            job_id, _, epoch = path.parent.name.rpartition("-e")
            if epoch.isdecimal():
                yield cls(path.parent, job_id), int(epoch)

    def epoch(self, epoch: int) -> EpochLayout:
        return EpochLayout(self.root / f"e{epoch}", self.job_id)

    def cuts_beside(self) -> list[Path]:
        """Directories of cuts that parts of the same job have on this node."""
        parts = self.parts_in(self.root.parent)
        return [path for layout, _ in parts if layout.job_id == self.job_id for path in layout.root.glob("e*/cut-*")]

    @property
    def checkpoints(self) -> Path:
        """The job's own store, where none was named: beside the run, because it outlives a run that is suspended."""
        return self.root.parent.parent / "checkpoints" / self.job_id

    @property
    def current(self) -> EpochLayout:
        """The epoch that counts: what is in any other may be incomplete or about to go."""
        return EpochLayout(self._current.resolve(), self.job_id)

    def set_current(self, epoch: EpochLayout) -> None:
        """Makes an epoch the one that counts, in one step."""
        fresh = self.root / "current.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(epoch.root.name)
        fresh.rename(self._current)

    @property
    def _current(self) -> Path:
        return self.root / "current"

    @property
    def socket(self) -> Path:
        return self.root / "shim.sock"

    @property
    def shim_log(self) -> Path:
        return self.root / "shim.log"

    @property
    def spec(self) -> Path:
        return self.root / "run.json"

    @property
    def result(self) -> Path:
        """How it ended, once it has."""
        return self.root / "result.json"

    @property
    def events(self) -> Path:
        """What has happened to a part, one JSON object a line."""
        return self.root / "events.jsonl"

    @property
    def kept_log(self) -> Path:
        """Where the node keeps what parts have logged, once they are gone."""
        return self.root.parent.parent / "parts.log"
