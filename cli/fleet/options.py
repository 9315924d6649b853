"""Arguments and options that several fleet commands have, with their completion."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

TIERS = ("premium", "standard", "basic")
_COMPLETION_S = 3.0


def complete_jobs(incomplete: str) -> list[str]:
    """Ids of the jobs that have not ended. Silent and empty where no fleet answers in time."""
    return _starting(incomplete, lambda: _ask(lambda fleet: fleet.job_ids(running=True)))


def complete_all_jobs(incomplete: str) -> list[str]:
    """Ids of all jobs, ended ones too."""
    return _starting(incomplete, lambda: _ask(lambda fleet: fleet.job_ids()))


def complete_nodes(incomplete: str) -> list[str]:
    """Names of the nodes."""

    async def names(fleet: Any) -> list[str]:
        return [record.node.name for record in await fleet.nodes()]

    return _starting(incomplete, lambda: _ask(names))


def complete_tiers(incomplete: str) -> list[str]:
    """Names of the tiers."""
    return _starting(incomplete, lambda: TIERS)


def _starting(incomplete: str, words: Callable[[], Iterable[str]]) -> list[str]:
    try:
        return [word for word in words() if word.startswith(incomplete)]
    except Exception:  # a shell that completes a line must not be disturbed, whatever is wrong with the fleet
        return []


def _ask(main: Callable[[Any], Any]) -> list[str]:
    import asyncio

    from cli.fleet.client import Fleet

    async def run() -> list[str]:
        async with asyncio.timeout(_COMPLETION_S):
            return await main(Fleet.load())

    return asyncio.run(run())


LiveJob = Annotated[str, typer.Argument(metavar="JOB", help="Id of a job.", autocompletion=complete_jobs)]
AnyJob = Annotated[str, typer.Argument(metavar="JOB", help="Id of a job.", autocompletion=complete_all_jobs)]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done, or cannot be.")]
WithNode = Annotated[str, typer.Option("--to", metavar="NODE", help="Name of the node.", autocompletion=complete_nodes)]


def print_json(value: object, *, compact: bool = False) -> None:
    """One JSON document on stdout."""
    import orjson

    option = orjson.OPT_APPEND_NEWLINE | (0 if compact else orjson.OPT_INDENT_2)
    sys.stdout.buffer.write(orjson.dumps(value, option=option | orjson.OPT_UTC_Z, default=str))
    sys.stdout.flush()


def print_table(content: RenderableType) -> None:
    """A table on stdout; where nobody watches, without the blanks that fill its last column."""
    from cli.console import data

    if data.is_terminal:
        data.print(content)
        return
    with data.capture() as capture:
        data.print(content)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))
    sys.stdout.flush()
