"""Numbers and states as people read them, and the tables of the fleet commands."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from model.units import counted

if TYPE_CHECKING:
    from model.control import JobView

_COLOURS = {
    "queued": "yellow",
    "starting": "cyan",
    "running": "green",
    "suspending": "magenta",
    "suspended": "magenta",
    "moving": "cyan",
    "resizing": "cyan",
    "completed": "dim green",
    "failed": "red",
    "cancelled": "dim",
}
_TIERS = {"premium": "bold", "standard": "", "basic": "dim"}
_SENTENCE = 24  # columns: a narrower one tears words apart


def table(*headings: str, right: tuple[str, ...] = (), fold: tuple[str, ...] = ()) -> Table:
    """An open table; columns in `right` are numbers, those in `fold` hold sentences and may take several lines."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        made.add_column(
            heading,
            justify="right" if heading in right else "left",
            no_wrap=heading not in fold,
            overflow="fold" if heading in fold else "ellipsis",
            min_width=_SENTENCE if heading in fold else None,
        )
    return made


def phase(name: str, *, held: bool = False) -> Text:
    """A phase in its colour; ``held`` tells that a person has preempted the job."""
    return Text(f"{name} (held)" if held else name, style=_COLOURS.get(name, ""))


def tier(name: str) -> Text:
    """A tier."""
    return Text(name, style=_TIERS.get(name, ""))


def duration(seconds: float) -> str:
    """Two units at most: ``45 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    whole = max(0, int(seconds))
    for size, unit, small, part in ((86_400, "d", "h", 3_600), (3_600, "h", "min", 60), (60, "min", "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit} {rest} {small}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def age(seconds: float) -> str:
    """One unit, for columns: ``45s``, ``3m``, ``2h``, ``12d``."""
    whole = max(0, int(seconds))
    for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if whole >= 2 * unit_s:
            return f"{whole // unit_s}{unit}"
    return f"{whole}s"


def milliseconds(value: float) -> str:
    """``840 ms`` or ``2.31 s``."""
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.2f} s"


def clock(time: datetime) -> str:
    """A moment in UTC, to the second: that is what logs and events are in."""
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def ranks(view: JobView) -> str:
    """``4 ranks``; ``its own ranks`` of a script that starts them."""
    return "its own ranks" if view.pack == "node" else counted(view.ranks, "rank")
