"""`ergo up` and `ergo down`: a local fleet in the background."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from cli.fleet import words

if TYPE_CHECKING:
    from infra.local.up import Up


def _directory(value: Path | None) -> Path | None:
    if value is not None and value.expanduser().exists() and not value.expanduser().is_dir():
        raise typer.BadParameter(f"{value} is not a directory.")
    return value


FleetDir = Annotated[
    Path | None,
    typer.Option(
        "--fleet-dir",
        metavar="DIR",
        help="The fleet's directory, else $ERGO_FLEET_DIR.",
        callback=_directory,
        show_default=False,
    ),
]
_Port = Annotated[int | None, typer.Option(min=1, max=65535, metavar="PORT", show_default=False)]


def register(app: typer.Typer) -> None:
    """Adds what this file defines to the command line."""
    app.command("up", short_help="Bring a local fleet up.")(up)
    app.command("down", short_help="Take the local fleet down.")(down)


def up(
    nodes: Annotated[
        int | None,
        typer.Option(
            min=0, max=64, help="Node agents on this machine; default: as before, else 2.", show_default=False
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="CPU accelerators of each node; default: as before, else 2.", show_default=False
        ),
    ] = None,
    fleet_dir: FleetDir = None,
    temporal_port: _Port = None,
    ui_port: _Port = None,
    kafka_port: _Port = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay, and take it down when interrupted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable addresses.")] = False,
) -> None:
    """Starts Temporal, Kafka, the scheduler, job workers and node agents, and waits until all of them serve.

    Where TEMPORAL_ADDRESS (or a Temporal profile), ERGO_KAFKA_BOOTSTRAP_SERVERS or ERGO_STORE_URL name a service that
    is there already, the fleet uses that one. Ports that are not given are free ones. They, the number of nodes and of
    devices stay what they are over the next `up`, unless it says otherwise. What the fleet has stored stays too. A
    fleet that is up already, and not with other options, is success.
    """
    from infra.local import up as local
    from infra.local.prepare import UpOptions
    from infra.settings import default_fleet_dir

    started = time.monotonic()
    directory = (fleet_dir or default_fleet_dir()).expanduser().absolute()
    options = UpOptions(nodes, devices, temporal_port, ui_port, kafka_port)

    def ready(result: Up) -> None:
        _show(directory, result, time.monotonic() - started, as_json=as_json)

    with _interruptible(), _progress() as progress:
        try:
            if foreground:
                local.up_in_foreground(directory, options, progress, ready)
            else:
                result = local.up(directory, options, progress)
        except _Interrupted as interrupted:
            _say(f"interrupted by {signal.Signals(interrupted.number).name}: nothing of the fleet is left running.")
            raise typer.Exit(128 + interrupted.number) from None
    ready(result)


def down(
    fleet_dir: FleetDir = None,
    purge: Annotated[bool, typer.Option("--purge", help="Remove all that it has stored, too.")] = False,
) -> None:
    """Ends every process of the fleet, those of its jobs too. Jobs go on from their checkpoints at the next `up`."""
    from infra.local.down import down as take_down
    from infra.settings import default_fleet_dir

    directory = (fleet_dir or default_fleet_dir()).expanduser().absolute()
    there = directory.is_dir()
    was_up = take_down(directory, purge=purge)
    removed = f" Removed {directory}." if purge and there else f" There is no {directory}." if not there else ""
    _say(("The fleet is down." if was_up else "No fleet is up.") + removed)


class _Interrupted(BaseException):
    """A signal came. Not an Exception: nothing on the way may take it for one."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def _interruptible() -> Iterator[None]:
    """The first SIGINT or SIGTERM unwinds what was begun; a second one must not stop that."""

    def take(number: int, _: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise _Interrupted(number)

    before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Lines:
    """Progress where nobody watches: a line for each part."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def parts(self, names: tuple[str, ...]) -> None:
        """Nothing to say yet."""

    def done(self, part: str, detail: str) -> None:
        """One more line."""
        _say(f"{part}: up after {time.monotonic() - self._started:.1f} s ({detail})")

    def say(self, text: str) -> None:
        """One more line."""
        _say(text)


class _Live:
    """Progress on a terminal: one spinner a part, until it is up."""

    def __init__(self, live: Any) -> None:
        self._live = live
        self._tasks: dict[str, Any] = {}

    def parts(self, names: tuple[str, ...]) -> None:
        """Adds a spinner for each."""
        for name in names:
            self._tasks[name] = self._live.add_task(name, total=1, detail="")

    def done(self, part: str, detail: str) -> None:
        """Ends its spinner."""
        self._live.update(self._tasks[part], completed=1, detail=detail)

    def say(self, text: str) -> None:
        """A line above the spinners."""
        self._live.console.print(f"ergo: {text}", markup=False)


@contextmanager
def _progress() -> Iterator[_Lines | _Live]:
    from cli.console import messages

    if not messages.is_terminal:
        yield _Lines()
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description:<12}"),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[detail]}[/]"),
    )
    with Progress(*columns, console=messages, transient=True) as live:
        yield _Live(live)


def _show(directory: Path, result: Up, seconds: float, *, as_json: bool) -> None:
    fleet = result.fleet
    if as_json:
        document = {**fleet.model_dump(mode="json"), "fleet_dir": str(directory), "already_up": result.already}
        sys.stdout.buffer.write(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))
        sys.stdout.flush()
        return
    how = "is up already" if result.already else f"is up after {seconds:.1f} s"
    nodes, devices = words.counted(fleet.nodes, "node"), words.counted(fleet.devices, "device")
    _say(f"The fleet {how}: {nodes}, {devices} each.")
    lines = {
        "Temporal UI": fleet.temporal_ui,
        "Temporal": fleet.temporal_address,
        "Kafka": fleet.kafka_bootstrap_servers,
        "store": fleet.store_url,
        "logs": str(directory / "logs"),
    }
    for name, value in lines.items():
        if value:
            sys.stdout.write(f"{name:<12} {value}\n")
    sys.stdout.flush()
    if os.environ.get("ERGO_FLEET_DIR") != str(directory) and not _is_default(directory):
        _say(f"For other commands: export ERGO_FLEET_DIR={directory}")


def _is_default(directory: Path) -> bool:
    from infra.settings import default_fleet_dir

    return directory == default_fleet_dir()


def _say(text: str) -> None:
    from cli.console import say

    say(text)
