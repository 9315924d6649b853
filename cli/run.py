"""`ergo run`: ranks and device proxies in the foreground, as torchrun would, and cuts on demand."""

from __future__ import annotations

import itertools
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from cli.console import cut_sentence, cut_table, messages, say
from cli.usage import LAST_STEP, MOST_RANKS, once
from model.units import counted, parse_bytes
from proxy_runtime.errors import ErgoError

if TYPE_CHECKING:
    from proxy_runtime.job import Job
    from proxy_runtime.shim.spec import CutRequest

_LEAD_S = 2.0
_PATIENCE_S = 3.0  # after a signal, before saying what a second one does
_LONGEST_S = 365 * 86_400.0
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def register(app: typer.Typer) -> None:
    """Adds what this file defines to the command line."""
    app.command(
        "run",
        context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
        short_help="Run a script on device proxies, in the foreground.",
    )(run)


def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="A Python script, or -m MODULE.")
    ] = None,
    nproc: Annotated[int, typer.Option(help="Ranks, each a process of the script.", min=1, max=MOST_RANKS)] = 1,
    pack: Annotated[
        str,
        typer.Option(help="rank: a process of the script for each rank; node: one, which starts its own ranks."),
    ] = "rank",
    devices: Annotated[
        int | None, typer.Option(help="CPU accelerators (device proxies); default: one a rank.", min=1, max=MOST_RANKS)
    ] = None,
    cut_at: Annotated[
        list[int] | None,
        typer.Option(
            help="Cut when this step is done, counted over all optimizers; may be repeated.",
            min=0,
            max=LAST_STEP,
            callback=once,
        ),
    ] = None,
    cut_every: Annotated[str | None, typer.Option(help="Cut at this interval, wherever the job is: 3s, 500ms.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Cuts only checkpoint; the processes go on.")] = False,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(help="Keep checkpoints here; default: a store of the run's own, kept until the job is done."),
    ] = None,
    restore: Annotated[
        Path | None, typer.Option(help="Continue the last checkpoint of this directory instead of starting.")
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="With --restore: which checkpoint.")] = "HEAD",
    job_id: Annotated[
        str | None, typer.Option("--job", help="With --restore: whose checkpoint, where DIR holds several jobs.")
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="The job directory; default: the current one. With --restore: where its files are now."
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option(help="Threads a device; constant for the life of a job.", min=1, max=1024)
    ] = 1,
    device_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of each rank's device: 800MiB, 16GiB; default: all of the machine."),
    ] = None,
    transport: Annotated[str, typer.Option(help="Between device proxies: shm or tcp.")] = "shm",
    network: Annotated[
        str, typer.Option(help="host, or private: a namespace for each rank in which only loopback is up.")
    ] = "host",
    python: Annotated[str, typer.Option(help="Interpreter of the ranks.")] = sys.executable,
    json_report: Annotated[Path | None, typer.Option(help="Write what happened as JSON to this file.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the script's own output.")] = False,
) -> None:
    """Runs SCRIPT with torch's `cuda` device served by device proxies.

    Each rank sees one device, cuda:0. The script needs no change and no GPU. A cut checkpoints the job, ends
    all its processes, and restores them as another node would; the script does not notice, and every number
    stays the same, bit for bit. The job's exit code is the script's own.
    """
    from proxy_runtime.job import Job, JobOptions

    if transport not in ("shm", "tcp"):
        raise typer.BadParameter(f"{transport!r} is neither shm nor tcp", param_hint="--transport")
    if network not in ("host", "private"):
        raise typer.BadParameter(f"{network!r} is neither host nor private", param_hint="--network")
    if pack not in ("rank", "node"):
        raise typer.BadParameter(f"{pack!r} is neither rank nor node", param_hint="--pack")
    if pack == "node" and nproc != 1:
        raise typer.BadParameter(
            "a script that starts its own ranks is started once; say --devices", param_hint="--nproc"
        )
    interval = _seconds(cut_every) if cut_every else None
    if restore:
        begun_with = {
            "--nproc": nproc != 1,
            "--pack": pack != "rank",
            "--threads": threads != 1,
            "--device-memory": device_memory is not None,
            "--network": network != "host",
            "--python": python != sys.executable,
        }
        for option in (option for option, given in begun_with.items() if given):
            raise typer.BadParameter("a job keeps what it began with", param_hint=option)
        if checkpoint_dir is not None:
            raise typer.BadParameter("a job goes on with the checkpoints of --restore", param_hint="--checkpoint-dir")
    if restore and command:
        raise typer.BadParameter("a checkpoint is continued with its own script", param_hint="SCRIPT")
    if not restore and (checkpoint != "HEAD" or job_id is not None):
        raise typer.BadParameter("only with --restore", param_hint="--checkpoint, --job")
    if json_report is not None and not json_report.absolute().parent.is_dir():
        raise typer.BadParameter(f"{json_report.absolute().parent} is not a directory", param_hint="--json-report")
    if json_report is not None and json_report.is_dir():
        raise typer.BadParameter(f"{json_report} is a directory", param_hint="--json-report")
    options = JobOptions(
        argv=() if restore else _command(command, python, directory, launcher=pack == "node"),
        pack="node" if pack == "node" else "rank",
        world_size=nproc,
        devices=devices or (0 if restore else nproc),
        cwd=directory,
        checkpoint_dir=restore or checkpoint_dir,
        threads=threads,
        device_memory=_bytes(device_memory) if device_memory else 0,
        transport=transport,
        network=network,
        python=python,
    )
    tell = (lambda _: None) if quiet else say
    foreground = _Foreground(tell)
    with foreground.signals():
        try:
            job = Job.restore(checkpoint, options, tell, job_id=job_id) if restore else Job.start(options, tell)
            foreground.take(job)
        except _InterruptedEarly as early:
            tell(f"interrupted by {signal.Signals(early.number).name}: nothing was started.")
            raise typer.Exit(128 + early.number) from None
        ranks, devices = job.spec.world_size, job.spec.devices
        what = "a script that starts its own ranks" if job.spec.pack == "node" else counted(ranks, "rank")
        tell(f"job {job.spec.job_id}: {what} on {counted(devices, 'device')}")
        code = foreground.follow(job, sorted(cut_at or []), interval, move=not live)
    if job.cuts and not quiet:
        messages.print(cut_table(job.cuts))
    if json_report is not None:
        json_report.write_bytes(orjson.dumps(foreground.report(job, code), option=orjson.OPT_INDENT_2))
    raise typer.Exit(code)


def _bytes(text: str) -> int:
    try:
        size = int(parse_bytes(text))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {error}", param_hint="--device-memory") from None
    if size == 0:
        raise typer.BadParameter("a device of 0 bytes can hold nothing", param_hint="--device-memory")
    return size


def _write(output: bytes) -> None:
    """To standard output, which may be closed: then nobody wants it.

    Raises:
        RunError: it cannot be written. The job ends with the command.
    """
    from proxy_runtime.shim.spec import RunError

    if sys.stdout is None:
        return
    try:
        sys.stdout.buffer.write(output)
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # whoever reads has read enough: no word about it
    except OSError as error:
        sys.stdout = None  # or the interpreter tries again when it ends
        raise RunError(
            f"the job's output cannot be written ({error.strerror}); the job was ended.", code="run.output"
        ) from error


class _InterruptedEarly(BaseException):
    """A signal arrived before there was a job to end. Not an Exception: nothing on the way may take it for one."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Foreground:
    """Follows one job: its logs to stdout, cuts on demand, signals to its end."""

    def __init__(self, tell: Any) -> None:
        self._tell = tell
        self._interrupted = 0
        self._killed = False
        self._job: Job | None = None
        self._told = 0
        self._offsets: dict[int, int] = {}
        self._partial: dict[int, bytes] = {}
        self._rss: list[int] = []

    def signals(self) -> _Signals:
        return _Signals(self)

    def take(self, job: Job) -> None:
        """From here on a signal ends `job`."""
        self._job = job

    def interrupt(self, number: int) -> None:
        """Takes a signal: the first ends the job in order, the second kills what is left of it."""
        if not self._interrupted:
            self._interrupted = number
            if self._job is None:
                raise _InterruptedEarly(number)
            threading.Thread(target=self._end, args=(self._job,), daemon=True).start()
        elif self._job is not None and not self._killed:
            self._killed = True
            threading.Thread(target=self._job.kill, daemon=True).start()

    def _end(self, job: Job) -> None:
        threading.Thread(target=_quietly(job.end), daemon=True).start()
        limit = time.monotonic() + _PATIENCE_S
        while time.monotonic() < limit and not job.ended:
            time.sleep(0.02)
        if not (job.ended or self._killed):
            self._tell("the job is still ending; interrupt again to kill everything of it.")

    def follow(self, job: Job, cut_at: list[int], interval: float | None, *, move: bool) -> int:
        """Returns the exit code of the job."""
        self._offsets = dict(enumerate(job.log_offsets))
        driver = threading.Thread(target=self._cut_on_plan, args=(job, cut_at, interval, move), daemon=True)
        driver.start()
        next_sample = 0.0
        while not job.ended:
            self._pump(job)
            self._tell_cuts(job)
            if time.monotonic() >= next_sample:
                next_sample = time.monotonic() + 0.5
                self._sample(job)
            time.sleep(0.02)
        driver.join(5)
        self._pump(job, last=True)
        self._tell_cuts(job)
        result = job.wait()
        assert result is not None
        if self._interrupted:
            how = " again: everything of the job was killed." if self._killed else ": everything of the job was ended."
            self._tell(f"interrupted by {signal.Signals(self._interrupted).name}{how}")
            return 128 + self._interrupted
        if result.sentence:
            self._tell(result.sentence)
        return result.code

    def report(self, job: Job, code: int) -> dict[str, Any]:
        return {
            "job": job.spec.job_id,
            "ranks": list(range(job.spec.processes)),
            "devices": job.spec.devices,
            "exit_code": code,
            "rss_mb": [round(size / 1e6, 1) for size in self._rss],
            "cuts": [
                {**report.to_json(), **{f"{part}_ms": round(value, 2) for part, value in report.ms.items()}}
                for report in job.cuts
            ],
        }

    def _sample(self, job: Job) -> None:
        try:
            sizes = job.status().get("rss_bytes", [])
        except ErgoError:
            return
        self._rss = [max(pair) for pair in itertools.zip_longest(sizes, self._rss, fillvalue=0)]

    # ------------------------------------------------------------------ logs

    def _pump(self, job: Job, *, last: bool = False) -> None:
        many = job.spec.processes > 1
        for rank in range(job.spec.processes):
            try:
                with open(job.log_path(rank), "rb") as file:
                    file.seek(self._offsets.get(rank, 0))
                    fresh = file.read()
            except FileNotFoundError:
                continue
            if not fresh and not (last and self._partial.get(rank)):
                continue
            self._offsets[rank] = self._offsets.get(rank, 0) + len(fresh)
            text = self._partial.pop(rank, b"") + fresh
            whole, _, rest = text.rpartition(b"\n") if not last else (text.rstrip(b"\n"), b"", b"")
            if rest:
                self._partial[rank] = rest
            if whole:
                prefix = f"[rank{rank}] ".encode() if many else b""
                _write(b"".join(prefix + line + b"\n" for line in whole.split(b"\n")))

    # ------------------------------------------------------------------ cuts

    def _cut_on_plan(self, job: Job, cut_at: list[int], interval: float | None, move: bool) -> None:
        from proxy_runtime.shim.spec import CutRequest

        try:
            for step in cut_at:
                if self._until_near(job, step):
                    self._report_cut(job, CutRequest(move=move, at_step=step))
            while interval is not None and not job.ended:
                limit = time.monotonic() + interval
                while time.monotonic() < limit and not job.ended:
                    time.sleep(0.02)
                if not job.ended:
                    self._report_cut(job, CutRequest(move=move))
        except ErgoError:
            return  # the job has ended; its own result says how

    def _until_near(self, job: Job, step: int) -> bool:
        """Waits until `step` is about two seconds away; False when the job ends before.

        The cut is asked for ahead of its step: its preparations (fresh proxies, CRIU) take a moment themselves,
        and until the step the job runs on.
        """
        first: tuple[float, int] | None = None
        while not job.ended:
            steps = job.status().get("step", [])
            now, done = time.monotonic(), min(steps, default=0)
            if done > 0 and first is None:
                first = (now, done)
            rate = 0.0 if first is None or now == first[0] else (done - first[1]) / (now - first[0])
            if steps and step - done <= max(1.0, _LEAD_S * rate):
                return True
            time.sleep(0.005)
        return False

    def _report_cut(self, job: Job, request: CutRequest) -> None:
        job.cut(request)

    def _tell_cuts(self, job: Job) -> None:
        """One line for every cut, whoever has asked for it."""
        fresh = job.cuts[self._told :]
        self._told += len(fresh)
        for report in fresh:
            self._tell(cut_sentence(report))


class _Signals:
    """SIGINT and SIGTERM end the job; installed while it runs."""

    def __init__(self, foreground: _Foreground) -> None:
        self._foreground = foreground
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._received)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _received(self, number: int, _: FrameType | None) -> None:
        self._foreground.interrupt(number)


def _command(
    command: list[str] | None, python: str, directory: Path | None, *, launcher: bool = False
) -> tuple[str, ...]:
    from proxy_runtime.shim.spec import RunError

    if not command:
        raise typer.BadParameter("a script is needed", param_hint="SCRIPT")
    if command[0] == "-m":
        if len(command) < 2:
            raise typer.BadParameter("-m needs the name of a module", param_hint="SCRIPT")
        return (_interpreter(python), *command)
    if command[0].startswith("-"):
        raise typer.BadParameter(f"there is no option {command[0]}; a script is needed", param_hint="SCRIPT")
    if directory is not None and not directory.is_dir():
        raise RunError(f"the job directory {directory} does not exist.", code="run.no-directory")
    script = (directory or Path.cwd()).absolute() / command[0]
    if script.is_dir():
        raise RunError(f"{script} is a directory, not a script.", code="run.no-script")
    if not script.is_file() and launcher:
        # The interpreter itself, or a program that its environment brings: torchrun, accelerate.
        beside = Path(_interpreter(python)).parent / command[0]
        found = _interpreter(python) if command[0] in ("python", "python3") else shutil.which(str(beside))
        found = found or shutil.which(command[0])
        if found is not None:
            return (str(Path(found).absolute()), *command[1:])
    if not script.is_file():
        raise RunError(f"the script {script} does not exist.", code="run.no-script")
    return (_interpreter(python), str(script), *command[1:])


def _interpreter(python: str) -> str:
    from proxy_runtime.shim.spec import RunError

    found = shutil.which(python)
    if found is None:
        raise RunError(f"the interpreter {python} does not exist.", code="run.no-python")
    return str(Path(found).absolute())


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text)
    if match is None or not 0 < float(match[1]) * _UNITS[match[2] or "s"] <= _LONGEST_S:
        raise typer.BadParameter(f"{text!r} is not a duration such as 3s or 500ms", param_hint="--cut-every")
    return float(match[1]) * _UNITS[match[2] or "s"]


def _quietly(call: Any) -> Any:
    def attempt() -> None:
        try:
            call()
        except ErgoError:
            return

    return attempt
