"""The runtime as a library: run a job on this machine, cut it, move it, restore it.

job = Job.start(JobOptions(argv=("python", "train.py"), world_size=2, devices=2))
report = job.cut(CutRequest(at_step=50))
result = job.wait()
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.errors import ModelError
from model.splicing import check_width
from model.units import counted
from proxy_runtime import build
from proxy_runtime.checkpoint.store import Store
from proxy_runtime.process import checks
from proxy_runtime.process.namespace import Network
from proxy_runtime.shim import aftermath
from proxy_runtime.shim.client import ShimClient, running_jobs
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.spec import SLOTS_PER_DEVICE, CutReport, CutRequest, Pack, RunError, RunSpec

# Our settings are not a job's, but for what a script's author sets for the script.
_FOR_RANKS = frozenset({"ERGO_LAUNCH_BLOCKING"})
# Of a rank or a device proxy; less than any real one has, so that nothing possible is refused.
_LEAST_PROCESS_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What to run. Paths are made absolute; `cwd` defaults to the current directory.

    `checkpoint_dir` defaults to a store of the job's own, which is removed when the job is done and kept when it
    is suspended or fails; `keep_run` keeps the run directory (logs, result).
    """

    argv: tuple[str, ...]
    world_size: int = 1  # with `pack` node: the script's own business
    devices: int = 1
    cwd: Path | None = None
    env: dict[str, str] | None = None
    checkpoint_dir: Path | None = None
    threads: int = 1
    device_memory: int = 0
    transport: str = "shm"
    network: Network = "host"
    linger: bool = False
    keep_run: bool = False
    python: str = sys.executable
    pack: Pack = "rank"
    job_id: str = field(default_factory=lambda: f"run-{uuid.uuid4().hex[:8]}")


@dataclass(frozen=True, slots=True)
class JobResult:
    """Exit code of the job (75: suspended), and the sentence that explains one that is not 0."""

    code: int
    sentence: str


class Job:
    """A job of this machine, seen from the process that started it."""

    def __init__(self, spec: RunSpec, client: ShimClient, options: JobOptions) -> None:
        self.spec = spec
        self.client = client
        self._options = options
        self._result: JobResult | None = None
        self._suspended = False
        self._done = threading.Event()
        self.cuts: list[CutReport] = []  # of everybody who has asked for one
        self._cuts_lock = threading.Lock()
        self.log_offsets = [0] * spec.processes  # of a continued job: where its earlier output ends, bytes
        self.on_event: Callable[[dict[str, Any]], None] = lambda _: None

    # ------------------------------------------------------------------ starting

    @classmethod
    def start(cls, options: JobOptions, progress: Callable[[str], None] = lambda _: None) -> Job:
        """Starts a job. Raises ErgoError with nothing left behind."""
        if options.checkpoint_dir is not None:
            Store.open(options.checkpoint_dir)  # one that cannot be used is said now, not when a cut fails
        job = cls._spawn(_spec(options), options, progress)
        job._begin(job.client.start)
        return job

    @classmethod
    def restore(
        cls,
        checkpoint: str,
        options: JobOptions,
        progress: Callable[[str], None] = lambda _: None,
        *,
        job_id: str | None = None,
    ) -> Job:
        """Continues a checkpoint of the store `options.checkpoint_dir` on `options.devices` devices.

        `options.cwd`, if given, is where the job directory's own files are now; the ranks see it at the path
        that they have always seen. `job_id` says whose checkpoint where the store has several jobs.

        Raises:
            ErgoError: damaged, of another build, a file missing: one sentence, nothing left behind.
        """
        if options.checkpoint_dir is None:
            raise RunError("a checkpoint directory is needed to restore from.", code="run.bad-spec")
        reader = Store.open(options.checkpoint_dir, create=False).read(checkpoint, job_id)
        header = reader.manifest.header
        made_by = build.by_id(header.build_id)
        files = (options.cwd or Path(header.cwd)).absolute()
        if not files.is_dir():
            raise RunError(
                f"the job directory {files} does not exist.",
                code="run.no-directory",
                remedy="Say with --dir where the job's files are now.",
            )
        spec = RunSpec(
            job_id=reader.manifest.job,
            argv=tuple(header.argv),
            cwd=header.cwd,
            env=dict(header.env),
            world_size=header.world_size,
            devices=options.devices or len(set(header.placement)),
            checkpoint_dir=str(options.checkpoint_dir.absolute()),
            threads=header.numerics.threads_per_device,
            transport=options.transport,
            network=header.network,
            linger=options.linger,
            base_dir=str(files),
            pack=header.pack,
            python=header.python,
        )
        if spec.pack == "rank" and spec.devices != len(set(header.placement)):
            require_width(spec.world_size, spec.devices)
        if header.python and not os.access(header.python, os.X_OK):
            raise RunError(f"the interpreter {header.python} of this job is not on this machine.", code="run.no-python")
        job = cls._spawn(spec, options, progress, made_by)
        job.log_offsets = [rank.log_offset for rank in header.ranks[: spec.processes]]
        steps = sorted(set(header.steps))
        progress(f"continues checkpoint {reader.id} at step {'-'.join(map(str, steps))}")
        job._begin(lambda: job.client.restore(checkpoint))
        return job

    @classmethod
    def _spawn(
        cls,
        spec: RunSpec,
        options: JobOptions,
        progress: Callable[[str], None],
        made_by: build.Build | None = None,
    ) -> Job:
        layout = RunLayout.of(spec.job_id)
        _claim(layout)
        _require_machine(spec)
        aftermath.sweep()
        used = made_by or build.ensure(options.python, progress)
        try:
            return cls(spec, ShimClient.spawn(spec, used.root), options)
        except BaseException:
            aftermath.clean(layout)
            raise

    def _begin(self, call: Callable[[], None]) -> None:
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            call()
        except BaseException:
            self.kill()
            self._done.wait(30)
            self._clean()
            raise

    # ------------------------------------------------------------------ while it runs

    def status(self) -> dict[str, Any]:
        return self.client.status()

    def cut(self, request: CutRequest) -> CutReport:
        """One cut; see `CutReport.outcome` for what came of it."""
        report = self.client.cut(request)
        self._note(report)
        return report

    def _note(self, report: CutReport) -> None:
        with self._cuts_lock:
            if report not in self.cuts:  # told twice: to whoever asked, and to all who watch
                self.cuts.append(report)

    def end(self) -> None:
        """Ends the job now; `wait` then returns code 130."""
        self.client.end()

    def kill(self) -> None:
        """Kills everything of the job, its shim first, whatever state that is in."""
        self.client.kill()

    def _watch(self) -> None:
        for event in self.client.events():
            if event["event"] == "cut":
                self._note(CutReport(**event["report"]))
            if event["event"] == "cut" and event["report"]["outcome"] == "stopped":
                self._suspended = True  # its files are in the checkpoint, and come home when it has been continued
            if event["event"] == "ended":
                self._result = JobResult(event["code"], event["sentence"])
            self.on_event(event)
        if self._result is None:
            stored = self.client.result()
            self._result = JobResult(**stored) if stored else JobResult(1, "the shim of the job was killed.")
        self._done.set()

    # ------------------------------------------------------------------ the end

    def wait(self, timeout_s: float | None = None) -> JobResult | None:
        """Blocks until the job has ended and brings its files home; None after `timeout_s` seconds."""
        if not self._done.wait(timeout_s):
            return None
        self.client.close()
        self.client.wait_gone(30.0)
        result = self._result
        assert result is not None
        if not self._suspended:
            aftermath.bring_home(self.client.layout, self.spec)
        if self._continuable(result):
            remedy = f" Continue it with: ergo run --restore {self.spec.checkpoint_dir}"
            self._result = result = JobResult(result.code, result.sentence + remedy)
            self._clean(keep_checkpoints=True)
        else:
            self._clean()
        return result

    @property
    def ended(self) -> bool:
        return self._done.is_set()

    def logs(self, rank: int) -> str:
        """What the rank has written so far."""
        try:
            return self.log_path(rank).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def log_path(self, rank: int) -> Path:
        """The rank's output; another file after every move, with the same beginning."""
        return self.client.layout.current.log(rank)

    def _clean(self, *, keep_checkpoints: bool = False) -> None:
        if self._options.keep_run:
            aftermath.remove_mount_point(self.client.layout)
        else:
            aftermath.clean(self.client.layout, keep_checkpoints=keep_checkpoints)

    def _continuable(self, result: JobResult) -> bool:
        """The job did not end by itself or by its owner's will, and has a checkpoint to go on from."""
        if result.code in (0, 130):
            return False
        return any(Path(self.spec.checkpoint_dir).glob("tenants/*/jobs/*/HEAD"))


def require_width(ranks: int, devices: int) -> None:
    """Checks that every device gets as many ranks, where a job begins, goes on or is resized.

    Raises:
        RunError: ``run.bad-width``.
    """
    try:
        check_width(ranks, devices)
    except ModelError as error:
        raise RunError(str(error), code="run.bad-width") from error


def _spec(options: JobOptions) -> RunSpec:
    layout = RunLayout.of(options.job_id)
    cwd = (options.cwd or Path.cwd()).absolute()
    if not cwd.is_dir():
        raise RunError(f"the job directory {cwd} does not exist.", code="run.no-directory")
    if layout.root.is_relative_to(cwd):
        raise RunError(
            f"the job directory {cwd} contains Ergosphere's own state ({layout.root}).",
            code="run.nested-state",
            remedy="Set ERGO_HOME to a directory outside it, or run from another directory.",
        )
    env = dict(os.environ if options.env is None else options.env)
    env = {name: value for name, value in env.items() if name in _FOR_RANKS or not name.startswith("ERGO_")}
    spec = RunSpec(
        job_id=options.job_id,
        argv=options.argv,
        cwd=str(cwd),
        env=env,
        world_size=options.devices * SLOTS_PER_DEVICE if options.pack == "node" else options.world_size,
        devices=options.devices,
        pack=options.pack,
        checkpoint_dir=str((options.checkpoint_dir or layout.checkpoints).absolute()),
        threads=options.threads,
        device_memory=options.device_memory,
        transport=options.transport,
        network=options.network,
        linger=options.linger,
        python=_python(options.python),
    )
    if spec.pack == "rank":
        require_width(spec.world_size, spec.devices)
    return spec


def _python(given: str) -> str:
    """The absolute path of the job's interpreter; empty where it is our own."""
    found = os.path.abspath(shutil.which(given) or given)
    return "" if found == os.path.abspath(sys.executable) else found


def _require_machine(spec: RunSpec) -> None:
    """What can be known in no time; the rest is `ergo doctor`'s, and each part's own error."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (spec.processes + spec.devices) * _LEAST_PROCESS_BYTES > memory:
        raise RunError(
            f"{counted(spec.processes, 'rank')} on {counted(spec.devices, 'device')} do not fit this machine: each "
            f"is a process of at least {_LEAST_PROCESS_BYTES >> 20} MiB, and it has {memory >> 20} MiB of memory.",
            code="run.machine",
            remedy="Lower --nproc or --devices.",
        )
    for check in (checks.privileges(), checks.kernel()):
        if not check.ok:
            raise RunError(
                f"this machine cannot run jobs: {check.name}: {check.detail}.",
                code="run.machine",
                remedy=check.remedy,
            )


def _claim(layout: RunLayout) -> None:
    """A run directory belongs to one shim; one left by a killed machine is taken over."""
    if any(running.root == layout.root for running in running_jobs()):
        raise RunError(
            f"the job {layout.job_id} is running on this machine already.",
            code="run.already-running",
            remedy=f"End it first (`ergo local cancel {layout.job_id}`).",
        )
    shutil.rmtree(layout.root, ignore_errors=True)
