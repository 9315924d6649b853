"""Reads job logs: CSV, plain or gzip, of known formats or anybody's own. What cannot be used is counted, not hidden."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from model.errors import ModelError
from model.job_spec import Tier
from scheduling.simulator import formats
from scheduling.simulator.formats import ClockKind, Columns, TimeUnit, TraceFormat, Unusable
from scheduling.simulator.workload import TraceJob

FIRST_SHOWN = 5
_YEAR_S = 365.2425 * 86_400.0
_LONGEST_SPAN_S = 30 * _YEAR_S
# Nobody submits nothing for so long: what is on the other side of such a gap has a wrong time.
_LONGEST_GAP_S = 5 * _YEAR_S
# So many times as many lines have to say something else than a few, for those to be the wrong ones; than one: two.
_MANY = 4
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
        cut_off: files that end in the middle, or are damaged further on: after which line nothing of them is used.
    """

    jobs: list[TraceJob] = field(default_factory=list[TraceJob])
    files: list[str] = field(default_factory=list[str])
    formats: list[str] = field(default_factory=list[str])
    lines: int = 0
    damaged: int = 0
    first_damaged: list[Damage] = field(default_factory=list[Damage])
    renamed: int = 0
    cut_off: list[Damage] = field(default_factory=list[Damage])

    def add_damage(self, found: Iterable[Damage]) -> None:
        """Counts lines of a file that cannot be used, and keeps those that are among the first."""
        ordered = sorted(found, key=lambda damage: damage.line)
        self.damaged += len(ordered)
        self.first_damaged += ordered[: FIRST_SHOWN - len(self.first_damaged)]


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
    files: list[_File] = []
    for path in paths:
        file = _read(path, columns, unit, trace)
        file.leave_out_strays()
        trace.add_damage(file.damaged)
        files.append(file)
    with_jobs = [file for file in files if file.found]
    if not with_jobs:
        none = f"None of the {trace.lines} lines of" if trace.lines else "There is no job in"
        used = " could be used" if trace.lines else ""
        first = f" The first: {trace.first_damaged[0]}." if trace.first_damaged else ""
        cut_off = "".join(f" {damage}." for damage in trace.cut_off)
        raise ModelError(f"{none} {', '.join(trace.files)}{used}.{first}{cut_off}", code="trace.empty")
    _check_clocks(with_jobs)
    ids = _Ids()
    found = (replace(ids.own(one.job), log=number) for number, file in enumerate(files) for one in file.found)
    jobs = sorted(found, key=lambda job: job.submit_s)
    trace.renamed = ids.renamed
    begin = jobs[0].submit_s
    trace.jobs = [replace(job, submit_s=job.submit_s - begin) for job in jobs[:limit]]
    return trace


@dataclass(frozen=True, slots=True)
class _Found:
    """A job, where it is, and by which clock it was submitted."""

    job: TraceJob
    line: int
    clock: ClockKind


@dataclass(slots=True)
class _File:
    """What is in one file."""

    name: str
    found: list[_Found] = field(default_factory=list[_Found])
    damaged: list[Damage] = field(default_factory=list[Damage])

    def leave_out_strays(self) -> None:
        """Counts as damaged what a few lines say against all others: another kind of clock, or another age."""
        clocks = Counter(one.clock for one in self.found)
        for clock in clocks:
            few = [one for one in self.found if one.clock == clock]
            self._leave_out(few, lambda _, clock=clock: f"is one of {clock}, unlike those of most lines")
        if len({one.clock for one in self.found}) > 1:
            return  # nobody can tell which are right: `_check_clocks` tells
        ages = _ages(self.found)
        if len(ages) < 2:
            return
        most = max(ages, key=len)
        self._leave_out(
            [one for age in ages if age is not most for one in age],
            lambda one: f"is {_years(_distance(one, most))} from those of most lines",
        )

    def _leave_out(self, few: Sequence[_Found], why: Callable[[_Found], str]) -> None:
        if not few or (_MANY if len(few) > 1 else 2) * len(few) > len(self.found) - len(few):
            return
        lines = {one.line for one in few}
        self.damaged += [Damage(self.name, one.line, f"its time of submission {why(one)}") for one in few]
        self.found = [one for one in self.found if one.line not in lines]


def _ages(found: Sequence[_Found]) -> list[list[_Found]]:
    """The lines by time of submission, in parts between which there is nothing for longer than a log goes on."""
    parts: list[list[_Found]] = []
    for one in sorted(found, key=lambda one: one.job.submit_s):
        if not parts or one.job.submit_s - parts[-1][-1].job.submit_s > _LONGEST_GAP_S:
            parts.append([])
        parts[-1].append(one)
    return parts


def _distance(one: _Found, age: Sequence[_Found]) -> float:
    return max(age[0].job.submit_s - one.job.submit_s, one.job.submit_s - age[-1].job.submit_s)


def _years(seconds: float) -> str:
    years = seconds / _YEAR_S
    return f"{years:,.0f} years" if years < 1e6 else f"{years:.0e} years"


def _check_clocks(files: Sequence[_File]) -> None:
    """Checks that all files count from one zero, in one unit.

    Raises:
        ModelError: ``trace.clock``.
    """
    places = [(file, one) for file in files for one in file.found]
    first = places[0]
    for place in places:
        if place[1].clock != first[1].clock:
            raise ModelError(
                f"{_place(first)} has its time of submission as one of {first[1].clock}, {_place(place)} as one of "
                f"{place[1].clock}, and many lines are like either: nobody can tell which was first.",
                code="trace.clock",
                remedy="Bring the column into one form.",
            )
    places.sort(key=lambda place: place[1].job.submit_s)
    for before, after in itertools.pairwise(places):
        gap = after[1].job.submit_s - before[1].job.submit_s
        if gap > _LONGEST_GAP_S:
            between = f"From the submission of {_place(before)} to the next, of {_place(after)},"
            raise _clock_error(f"{between} it is {_years(gap)}", first[1].clock)
    span = places[-1][1].job.submit_s - places[0][1].job.submit_s
    if span > _LONGEST_SPAN_S:
        between = f"From the first submission, of {_place(places[0])}, to the last, of {_place(places[-1])},"
        raise _clock_error(f"{between} it is {_years(span)}", first[1].clock)


def _place(place: tuple[_File, _Found]) -> str:
    return f"{place[0].name} line {place[1].line}"


def _clock_error(what: str, clock: ClockKind) -> ModelError:
    remedy = {
        "numbers": "Say with --time-unit what the numbers count: s, min or ms.",
        "dates": "Correct the dates, or simulate the older part and the newer one each by itself.",
    }
    return ModelError(f"{what}: no log goes on for that long.", code="trace.clock", remedy=remedy[clock])


class _Ids:
    """Gives every job an id that no other one has."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}  # the last number that was put behind each
        self.renamed = 0

    def own(self, job: TraceJob) -> TraceJob:
        """The job, with a number behind its id if another one has it."""
        own = job.id
        while own in self._last:
            self._last[job.id] += 1
            own = f"{job.id}.{self._last[job.id]}"
        self._last[own] = 1
        if own == job.id:
            return job
        self.renamed += 1
        return replace(job, id=own)


def _read(path: Path, columns: Columns | None, unit: TimeUnit | None, trace: Trace) -> _File:
    with _lines_of(path) as lines:
        try:
            head = next(lines, "").rstrip("\r\n")
        except _CUT_OFF as error:
            raise ModelError(f"{path} cannot be read: {_reason(error)}.", code="trace.unreadable") from None
        if not head.strip():
            raise ModelError(f"{path} is empty, or its first line is.", code="trace.empty")
        if not head.isprintable() and "\0" in head:
            raise _not_csv(path, "not text")
        delimiter = max(_DELIMITERS, key=head.count)
        header = [cell.strip() for cell in _cells(head, delimiter)]
        kind = formats.format_of(path.name, header, columns, unit)
        trace.files.append(path.name)
        trace.formats.append(kind.name)
        return _read_lines(path.name, lines, delimiter, _Row(path, kind, header), trace)


def _read_lines(name: str, lines: Iterator[str], delimiter: str, row: _Row, trace: Trace) -> _File:
    file, line = _File(name), 1
    try:
        for line, text in enumerate(lines, 2):
            if not text.strip():
                continue
            trace.lines += 1
            try:
                clock, job = row.job(line, _cells(text.rstrip("\r\n"), delimiter))
            except (Unusable, csv.Error) as error:
                file.damaged.append(Damage(name, line, str(error)))
            else:
                file.found.append(_Found(job, line, clock))
    except _CUT_OFF as error:
        trace.cut_off.append(Damage(name, line, f"nothing after it can be read ({_reason(error)})"))
    return file


def _reason(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "the file ends in the middle"
    return getattr(error, "strerror", None) or str(error)


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
            raise Unusable(f"it has {len(cells)} cell{'s' * (len(cells) != 1)}, the header {self._width}")
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
            raise _not_csv(path, f"a {other} file" if other else "not text")
        content = gzip.GzipFile(fileobj=raw) if zipped else raw
        yield io.TextIOWrapper(content, encoding="utf-8-sig", errors="replace")


def _not_csv(path: Path, what: str) -> ModelError:
    return ModelError(f"{path} is {what}.", code="trace.unreadable", remedy="CSV is read, plain or with gzip.")
