"""What the columns of a job log mean: known formats, found by their header, and what a person says of their own."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Literal

from model.errors import ModelError
from model.job_spec import Tier

MOST_DEVICES = 1 << 20
LONGEST_S = 10 * 365 * 86_400.0
OUR_TIERS: Mapping[str, Tier] = {tier.value: tier for tier in Tier}


NEEDED = ("submit", "duration", "devices")
OPTIONAL = ("tenant", "tier", "id")


class TimeUnit(StrEnum):
    """What a number in a column of times counts."""

    S = "s"
    MIN = "min"
    MS = "ms"

    @property
    def seconds(self) -> float:
        """The length of one."""
        return {"s": 1.0, "min": 60.0, "ms": 1e-3}[self.value]


@dataclass(frozen=True, slots=True)
class Columns:
    """Which column of a log holds what; empty: none does."""

    submit: str
    duration: str
    devices: str
    tenant: str = ""
    tier: str = ""
    id: str = ""

    @classmethod
    def parse(cls, text: str) -> Columns:
        """Reads ``submit=A,duration=B,devices=C[,tenant=D][,tier=E][,id=F]``.

        Raises:
            ModelError: ``trace.columns``: something else, or one of the first three is missing.
        """
        known = [one.name for one in fields(cls)]
        given: dict[str, str] = {}
        for part in text.split(","):
            name, sign, column = (piece.strip() for piece in part.partition("="))
            if not sign or not column:
                raise _columns_error(f"--columns has {part.strip()!r}, which is not NAME=COLUMN.")
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                guess = f" Is {near[0]} meant?" if near else ""
                raise _columns_error(f"--columns knows {', '.join(known)}, but not {name!r}.{guess}")
            if name in given:
                raise _columns_error(f"--columns names {name} twice.")
            given[name] = column
        missing = [name for name in NEEDED if name not in given]
        if missing:
            raise _columns_error(f"--columns lacks {' and '.join(missing)}.")
        needed = [given[name] for name in NEEDED]
        if len(set(needed)) < len(needed):
            raise _columns_error("--columns takes two of submit, duration and devices from one column.")
        return cls(**given)

    def named(self) -> dict[str, str]:
        """The columns that there are, by what they hold."""
        found = {one.name: str(getattr(self, one.name)) for one in fields(self)}
        return {name: column for name, column in found.items() if column}


def _columns_error(what: str, example: str = "submit=queued_at,duration=run_s,devices=gpus") -> ModelError:
    return ModelError(what, code="trace.columns", remedy=f"Write for example --columns {example}.")


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A kind of log.

    Attributes:
        unit: of numbers in the columns of times.
        tiers: what the values of the tier's column mean.
        header: columns that a file of this kind has besides those read; they tell it from others.
    """

    name: str
    columns: Columns
    unit: TimeUnit = TimeUnit.S
    tiers: Mapping[str, Tier] = field(default_factory=lambda: OUR_TIERS)
    header: tuple[str, ...] = ()

    def fits(self, header: Sequence[str]) -> bool:
        """Is this the header of such a file?"""
        return {*self.columns.named().values(), *self.header} <= set(header)


# Classes of the Chronus traces: a strict deadline, a soft one, none.
_CHRONUS_CLASSES = {"strict": Tier.PREMIUM, "soft": Tier.STANDARD, "best": Tier.BASIC}
KNOWN: tuple[TraceFormat, ...] = (
    TraceFormat("ITP", Columns("submission_time", "duration", "num_gpu", id="job_id")),
    TraceFormat(
        "Chronus",
        Columns("submit_time", "duration", "num_gpu", tenant="user", tier="job_type", id="job_id"),
        TimeUnit.MIN,
        _CHRONUS_CLASSES,
        header=("expect_time_list", "best_effort"),
    ),
    TraceFormat("Philly", Columns("timestamp", "duration", "num_gpus", tenant="cluster"), header=("gpu_time",)),
)


def format_of(name: str, header: Sequence[str], columns: Columns | None, unit: TimeUnit | None) -> TraceFormat:
    """How to read a file with this header.

    Args:
        name: of the file, for what is said.
        columns: what a person has said; None: the header has to be a known one.
        unit: the same; None: the format's own.

    Raises:
        ModelError: ``trace.columns``: a column is not there, or nobody has said what the columns mean.
    """
    there = ", ".join(header[:20]) + (" ..." if len(header) > 20 else "")
    if columns is not None:
        twice = [column for column in columns.named().values() if header.count(column) > 1]
        if twice:
            raise ModelError(f"{name} has the column {twice[0]} more than once.", code="trace.columns")
        missing = [column for column in columns.named().values() if column not in header]
        if missing:
            raise ModelError(
                f"{name} has no column {' nor '.join(missing)}; its columns are {there}.", code="trace.columns"
            )
        return TraceFormat("CSV", columns, unit or TimeUnit.S)
    for known in KNOWN:
        if known.fits(header):
            return known if unit is None else TraceFormat(known.name, known.columns, unit, known.tiers, known.header)
    if set(NEEDED) <= set(header):  # our own names say what they hold
        optional = {column: column for column in OPTIONAL if column in header}
        return format_of(name, header, Columns(*NEEDED, **optional), unit)
    said = f"{name} is in none of the known formats ({', '.join(one.name for one in KNOWN)}); its columns are {there}. "
    if len(set(header)) < len(NEEDED):
        raise ModelError(
            f"{said}A job log has one column each for submit, duration and devices.",
            code="trace.columns",
            remedy=f"Give it the header {','.join(NEEDED)}, and a line for each job.",
        )
    raise _columns_error(said + "Say with --columns which of them hold submit, duration and devices.", _guessed(header))


_LIKELY = {
    "submit": ("submit", "queue", "arriv", "creat", "when", "start", "time"),
    "duration": ("duration", "run", "took", "ran", "elapsed", "length", "second", "time"),
    "devices": ("device", "gpu", "card", "accelerator", "num", "count", "size"),
}


def _guessed(header: Sequence[str]) -> str:
    """An example of ``--columns`` in the words of a header: columns whose names say it, else those that are left."""
    left = list(dict.fromkeys(header))
    chosen: dict[str, str] = {}
    for name in NEEDED:
        likely = (column for word in _LIKELY[name] for column in left if word in column.lower())
        if (found := next(likely, None)) is not None:
            chosen[name] = found
            left.remove(found)
    for name in NEEDED:
        if name not in chosen:
            chosen[name] = left.pop(0)
    return ",".join(f"{name}={chosen[name]}" for name in NEEDED)


class Unusable(ValueError):
    """A cell that cannot be what its column says; the text is the rest of a sentence about the line."""


ClockKind = Literal["numbers", "dates"]

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# The way Slurm writes durations: [days-]hours:minutes:seconds
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d(?:\.\d+)?)", re.ASCII)


def moment(text: str, unit: TimeUnit) -> tuple[ClockKind, float]:
    """A time of submission in seconds, and by which kind of clock: a number has the log's own zero, a date 1970.

    A date without an offset is taken as UTC.

    Raises:
        Unusable: it is neither.
    """
    if _NUMBER.fullmatch(text):
        seconds = float(text) * unit.seconds
        if not math.isfinite(seconds) or seconds < 0:
            raise Unusable(f"submit is {_shown(text)}, which is no time")
        return "numbers", seconds
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise Unusable(f"submit is {_shown(text)}, which is neither a number nor an ISO 8601 time") from None
    return "dates", (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def duration(text: str, unit: TimeUnit) -> float:
    """A duration in seconds: a number, or ``[days-]hours:minutes:seconds``.

    Raises:
        Unusable: it is neither, not positive, or longer than ten years.
    """
    if clock := _CLOCK.fullmatch(text):
        days, hours, minutes, rest = clock.groups()
        seconds = float(days or 0) * 86_400 + float(hours) * 3_600 + int(minutes) * 60 + float(rest)
    elif _NUMBER.fullmatch(text):
        seconds = float(text) * unit.seconds
    else:
        raise Unusable(f"duration is {_shown(text)}, which is no number")
    if not seconds > 0:
        raise Unusable(f"duration is {_shown(text)}, so that it never ran")
    if seconds > LONGEST_S:
        raise Unusable(f"duration is {_shown(text)}, more than ten years, which is absurd")
    return seconds


def devices(text: str) -> int:
    """A number of devices.

    Raises:
        Unusable: not a whole number from 1 to 2^20.
    """
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(number):
        raise Unusable(f"devices is {_shown(text)}, which is no number")
    if number != int(number):
        raise Unusable(f"devices is {_shown(text)}, a fraction: a job takes whole devices")
    if not 1 <= number <= MOST_DEVICES:
        raise Unusable(f"devices is {_shown(text)}, but a job takes 1 to {MOST_DEVICES}")
    return int(number)


def tier(text: str, tiers: Mapping[str, Tier]) -> Tier | None:
    """A tier by the word that the log has for it; None for an empty cell.

    Raises:
        Unusable: the word is not known.
    """
    if not text:
        return None
    found = tiers.get(text.lower())
    if found is None:
        raise Unusable(f"tier is {_shown(text)}, which is none of {', '.join(tiers)}")
    return found


def _shown(text: str) -> str:
    if not text:
        return "empty"
    short = text if len(text) <= 40 else text[:39] + "…"
    return short if _NUMBER.fullmatch(text) else repr(short)
