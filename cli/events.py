"""`ergo events`: what has happened to jobs and what was decided about them, from Kafka."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import usage
from cli.fleet.options import complete_all_jobs
from cli.usage import LAST_STEP
from model.units import counted

if TYPE_CHECKING:
    from events.consumer import EventReader, Record
    from events.types import Event


class TopicName(StrEnum):
    """The topics, as people call them."""

    JOBS = "jobs"
    DECISIONS = "decisions"
    TELEMETRY = "telemetry"


_Job = Annotated[
    str | None,
    typer.Option(
        "--job",
        metavar="JOB",
        help="Only this job's.",
        autocompletion=complete_all_jobs,
        callback=usage.job_id,
        show_default=False,
    ),
]
_Topic = Annotated[
    list[TopicName] | None,
    typer.Option("--topic", help="May be given several times; else jobs and decisions.", show_default=False),
]


def register(app: typer.Typer) -> None:
    """Adds what this file defines to the command line."""
    app.command("events", short_help="What has happened, and why.")(events)


def events(
    job: _Job = None,
    topic: _Topic = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay, and show what comes.")] = False,
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-n", min=1, max=LAST_STEP, help="At most so many, the newest.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One CloudEvent as JSON a line.")] = False,
) -> None:
    """Shows events of jobs and decisions in the order of their times, from the beginning.

    Each event is shown once, however often it was delivered, and none of an epoch that was already over.
    """
    from events.consumer import EventReader
    from events.errors import EventsError
    from events.types import Topic
    from infra.settings import Settings
    from proxy_runtime.errors import ErgoError

    topics = {
        TopicName.JOBS: Topic.JOB_EVENTS,
        TopicName.DECISIONS: Topic.DECISIONS,
        TopicName.TELEMETRY: Topic.TELEMETRY,
    }
    chosen = tuple(dict.fromkeys(topics[name] for name in topic or (TopicName.JOBS, TopicName.DECISIONS)))
    reader = EventReader(Settings.load().kafka(), chosen, client_id="ergo-events")
    shown = _Json() if as_json else _Lines()
    try:
        _run(reader, job, shown, limit=limit, follow=follow)
    except EventsError as error:
        raise ErgoError(error.message, code=error.code, remedy=error.remedy) from error
    except BrokenPipeError:
        sys.stderr.close()  # `| head` has seen enough
        raise typer.Exit(0) from None
    except KeyboardInterrupt:
        raise typer.Exit(0 if follow else 130) from None
    _tell_skipped(reader)


def _run(reader: EventReader, wanted: str | None, shown: _Json | _Lines, *, limit: int | None, follow: bool) -> None:
    import signal

    # What `ergo` does with Ctrl-C before a command has begun is not for one that is ended by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def ours(records: Iterable[Record | None]) -> Iterable[Record]:
        return (found for found in records if found is not None and wanted in (None, str(found.event.subject)))

    ordered = sorted(ours(reader.read()), key=_order)
    newest = [record.event for record in (ordered[-limit:] if limit else ordered)]
    shown.fit(newest)
    for event in newest:
        shown.show(event)
    sys.stdout.flush()
    if not ordered:
        from cli.console import say

        say("no events yet" if wanted is None else f"no events of job {wanted}; `ergo ps -a` lists all jobs")
    if follow:
        for record in ours(reader.follow()):
            shown.show(record.event)
            sys.stdout.flush()


def _order(record: Record) -> tuple[Any, ...]:
    from events.types import JobEvent

    event = record.event
    # Within one generation numbers say more than clocks do.
    number = (int(event.id.generation), int(event.id.seq)) if isinstance(event, JobEvent) else (0, record.offset)
    return (event.time, str(event.subject), *number)


class _Json:
    """A document an event."""

    def fit(self, known: Sequence[Event]) -> None:
        """Nothing is in columns."""

    def show(self, event: Event) -> None:
        """Writes one."""
        from events import envelope

        sys.stdout.buffer.write(envelope.to_json(event) + b"\n")


class _Lines:
    """A line an event, in columns that grow when they must: what comes later is not known yet."""

    def __init__(self) -> None:
        self._widths = [24, 12, 5, 24]
        self._begun = False

    def fit(self, known: Sequence[Event]) -> None:
        """Makes the columns wide enough for what is known already."""
        for event in known:
            self._widen(self._cells(event)[0])

    def show(self, event: Event) -> None:
        """Writes one."""
        from rich.text import Text

        from cli.console import data

        if not self._begun:
            self._begun = True
            data.print(Text(self._line(("TIME", "JOB", "EPOCH", "WHAT", "REASON")), style="bold"))
        cells, style = self._cells(event)
        data.print(Text(self._line(cells), style=style))

    def _cells(self, event: Event) -> tuple[tuple[str, ...], str]:
        what, reason, style = describe(event)
        time = event.time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return (time, str(event.subject), str(getattr(event, "epoch", "")), what, reason), style

    def _widen(self, cells: tuple[str, ...]) -> None:
        for index, cell in enumerate(cells[:-1]):
            self._widths[index] = max(self._widths[index], len(cell))

    def _line(self, cells: tuple[str, ...]) -> str:
        self._widen(cells)
        padded = [cell.ljust(width) for cell, width in zip(cells, self._widths, strict=False)]
        return "  ".join([*padded, cells[-1]]).rstrip()


def describe(event: Event) -> tuple[str, str, str]:
    """An event in words: what, why, and the style that it is shown in."""
    from events.types import CheckpointCommitted, DecisionMade, JobPhaseChanged, SharingIncident

    if isinstance(event, JobPhaseChanged):
        data = event.data
        what = f"{data.before} → {data.after}" if data.before else f"{data.after}"
        at = f" (step {data.step})" if data.step else ""
        code = f" Exit code {data.exit_code}." if data.exit_code is not None else ""
        return what, f"{data.reason}{code}{at}", _STYLES.get(data.after.value, "")
    if isinstance(event, DecisionMade):
        devices = event.data.placement.devices if event.data.placement else ()
        where = f" [{', '.join(str(device) for device in devices)}]" if devices else ""
        return f"decision: {event.data.action}", f"{event.data.reason}{where}", "cyan"
    if isinstance(event, CheckpointCommitted):
        data = event.data
        size = f"{data.stored_bytes / (1 << 20):.1f} of {data.total_bytes / (1 << 20):.1f} MiB stored"
        return f"checkpoint {data.kind}", f"Step {data.step}, {size}, devices stood still {data.stopped_ms} ms.", "dim"
    if isinstance(event, SharingIncident):
        return f"sharing: {event.data.kind}", event.data.reason, "red" if event.data.kind == "mismatch" else "yellow"
    data = event.data
    jobs = ", ".join(f"{part.job} at step {part.step}" for part in data.jobs) or "no job"
    devices = counted(len(data.devices), "device")
    free = data.host.memory_available_bytes / (1 << 30)
    return "report", f"{devices}, {jobs}, load {data.host.load_1m:.1f}, {free:.1f} GiB free.", "dim"


_STYLES = {"running": "green", "completed": "green", "failed": "red", "cancelled": "dim", "suspended": "magenta"}


def _tell_skipped(reader: EventReader) -> None:
    from cli.console import say

    unknown = reader.skipped.get("events.unknown-type", 0)
    broken = sum(reader.skipped.values()) - unknown
    if unknown:
        say(f"{unknown} events are of types that a newer build knows.")
    if broken:
        say(f"{broken} messages are no events of ours and were skipped: something else writes to these topics.")
