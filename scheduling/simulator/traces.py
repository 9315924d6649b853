"""Reads job logs: CSV, plain or gzip, of known formats or anybody's own. What cannot be used is counted, not hidden."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from model.errors import ModelError
from model.job_spec import Tier
from scheduling.simulator import formats
from scheduling.simulator.formats import ClockKind, Columns, TimeUnit, TraceFormat, Unusable
from scheduling.simulator.workload import TraceJob

FIRST_SHOWN = 5
_LONGEST_SPAN_S = 100 * 365 * 86_400.0
_DELIMITERS = ",;\t|"
_GZIP = b"\x1f\x8b"
# A file that ends in the middle, or is damaged further on.
_CUT_OFF = (EOFError, OSError, zlib.error)
_OTHER_CONTAINERS = {b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zX": "xz", b"BZh": "bzip2"}


@dataclass(frozen=True, slots=True)
class Damage:
    """A line that could not be used.

    Attributes:
        line: its number, the header being 1.
        why: the rest of the sentence that begins with the place.
    """

    file: str
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.file} line {self.line}: {self.why}"


@dataclass(slots=True)
class Trace:
    """The jobs of one or more logs, in the order of submission; the first is submitted at 0.

    Attributes:
        files: names, without their folders.
        formats: of which format each is.
        lines: lines that were read, headers and blank ones aside.
        damaged: how many of these could not be used; `first_damaged` a few of them.
        renamed: how many jobs had the id of another one and got a number behind it.
    """

    jobs: list[TraceJob] = field(default_factory=list[TraceJob])
    files: list[str] = field(default_factory=list[str])
    formats: list[str] = field(default_factory=list[str])
    lines: int = 0
    damaged: int = 0
    first_damaged: list[Damage] = field(default_factory=list[Damage])
    renamed: int = 0

    def add_damage(self, file: str, line: int, why: object) -> None:
        """Counts a line that cannot be used, and keeps it if it is one of the first."""
        self.damaged += 1
        if len(self.first_damaged) < FIRST_SHOWN:
            self.first_damaged.append(Damage(file, line, str(why)))


def read_traces(
    paths: Sequence[Path], *, columns: Columns | None = None, unit: TimeUnit | None = None, limit: int | None = None
) -> Trace:
    """Reads logs of one kind as one: their times are by the same clock.

    Args:
        columns: which column holds what; None: found by the header.
        unit: of numbers in the columns of times; None: the format's own, seconds for anybody's own.
        limit: take only so many jobs, the first submitted.

    Raises:
        ModelError: ``trace.unreadable``; ``trace.columns``; ``trace.empty``: no line could be used; ``trace.clock``:
            the files count from different zeros, or in another unit.
    """
    trace = Trace()
    reading = _Reading(trace)
    for path in paths:
        reading.read(path, columns, unit)
    jobs = sorted(trace.jobs, key=lambda job: job.submit_s)
    if not jobs:
        first = f" The first: {trace.first_damaged[0]}." if trace.first_damaged else ""
        raise ModelError(
            f"None of the {trace.lines} lines of {', '.join(trace.files)} could be used.{first}", code="trace.empty"
        )
    begin = jobs[0].submit_s
    if jobs[-1].submit_s - begin > _LONGEST_SPAN_S:
        raise ModelError(
            f"From the first submission to the last, {', '.join(trace.files)} takes "
            f"{(jobs[-1].submit_s - begin) / 365 / 86_400:,.0f} years.",
            code="trace.clock",
            remedy="Say with --time-unit what the numbers count: s, min or ms.",
        )
    trace.jobs = [replace(job, submit_s=job.submit_s - begin) for job in jobs[:limit]]
    return trace


class _Reading:
    """What has to be known over all files."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._ids: dict[str, int] = {}  # with the last number that was put behind each
        self._clock: tuple[str, ClockKind] | None = None

    def read(self, path: Path, columns: Columns | None, unit: TimeUnit | None) -> None:
        with _lines_of(path) as lines:
            try:
                head = next(lines, "").rstrip("\r\n")
            except _CUT_OFF as error:
                raise ModelError(f"{path} cannot be read: {error}.", code="trace.unreadable") from None
            if not head.strip():
                raise ModelError(f"{path} is empty.", code="trace.empty")
            delimiter = max(_DELIMITERS, key=head.count)
            header = [cell.strip() for cell in _cells(head, delimiter)]
            kind = formats.format_of(path.name, header, columns, unit)
            self._trace.files.append(path.name)
            self._trace.formats.append(kind.name)
            self._read_lines(path.name, lines, delimiter, _Row(path, kind, header))

    def _read_lines(self, name: str, lines: Iterator[str], delimiter: str, row: _Row) -> None:
        trace, line = self._trace, 1
        try:
            for line, text in enumerate(lines, 2):
                if not text.strip():
                    continue
                trace.lines += 1
                try:
                    clock, job = row.job(line, _cells(text.rstrip("\r\n"), delimiter))
                except (Unusable, csv.Error) as error:
                    trace.add_damage(name, line, error)
                else:
                    self._one_clock(f"{name} line {line}", clock)
                    trace.jobs.append(self._own_id(job))
        except _CUT_OFF as error:
            trace.add_damage(name, line + 1, f"the file cannot be read any further ({error})")

    def _one_clock(self, where: str, clock: ClockKind) -> None:
        if self._clock is None:
            self._clock = where, clock
        elif self._clock[1] != clock:
            raise ModelError(
                f"{self._clock[0]} has its time of submission as one of {self._clock[1]}, {where} as one of {clock}: "
                "nobody can tell which was first.",
                code="trace.clock",
                remedy="Bring the column into one form.",
            )

    def _own_id(self, job: TraceJob) -> TraceJob:
        own = job.id
        while own in self._ids:
            self._ids[job.id] += 1
            own = f"{job.id}.{self._ids[job.id]}"
        self._ids[own] = 1
        if own == job.id:
            return job
        self._trace.renamed += 1
        return replace(job, id=own)


class _Row:
    """Where the cells of a file are."""

    def __init__(self, path: Path, kind: TraceFormat, header: Sequence[str]) -> None:
        self._kind = kind
        self._width = len(header)
        at = {name: header.index(column) for name, column in kind.columns.named().items()}
        self._submit, self._duration, self._devices = at["submit"], at["duration"], at["devices"]
        self._tenant, self._tier, self._id = at.get("tenant"), at.get("tier"), at.get("id")
        self._stem = path.name.partition(".")[0]

    def job(self, line: int, cells: Sequence[str]) -> tuple[ClockKind, TraceJob]:
        """The job of a line, and by which clock it was submitted.

        Raises:
            Unusable: there is none in it.
        """
        if len(cells) < self._width or any(cells[self._width :]):
            raise Unusable(f"it has {len(cells)} cells, the header {self._width}")
        unit = self._kind.unit
        clock, submit_s = formats.moment(cells[self._submit].strip(), unit)
        return clock, TraceJob(
            id=self._cell(cells, self._id) or f"{self._stem}-{line}",
            submit_s=submit_s,
            duration_s=formats.duration(cells[self._duration].strip(), unit),
            devices=formats.devices(cells[self._devices].strip()),
            tenant=self._cell(cells, self._tenant) or "default",
            tier=self._tier_of(cells),
        )

    def _tier_of(self, cells: Sequence[str]) -> Tier | None:
        return formats.tier(self._cell(cells, self._tier), self._kind.tiers)

    @staticmethod
    def _cell(cells: Sequence[str], at: int | None) -> str:
        return "" if at is None else cells[at].strip()


def _cells(line: str, delimiter: str) -> list[str]:
    # Each line by itself: a quote that is never closed damages one line, not the rest of the file.
    if '"' not in line:
        return line.split(delimiter)
    return next(csv.reader([line], delimiter=delimiter))


@contextmanager
def _lines_of(path: Path) -> Generator[Iterator[str]]:
    """The lines of a file as text, one at a time; in one pass, so that a pipe does too."""
    try:
        raw = path.open("rb")
        head = raw.peek(512)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.", code="trace.unreadable") from None
    with raw:
        other = next((name for magic, name in _OTHER_CONTAINERS.items() if head.startswith(magic)), None)
        zipped = head.startswith(_GZIP)
        if other is not None or (not zipped and b"\0" in head.partition(b"\n")[0]):
            what = f"a {other} file" if other else "not text"
            raise ModelError(f"{path} is {what}.", code="trace.unreadable", remedy="CSV is read, plain or with gzip.")
        content = gzip.GzipFile(fileobj=raw) if zipped else raw
        yield io.TextIOWrapper(content, encoding="utf-8-sig", errors="replace")
