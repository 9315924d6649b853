"""`ergo ps`: the jobs of the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from cli.console import data, say
from cli.fleet.options import AsJson, Watch, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from cli.fleet.client import Fleet
    from cli.fleet.overview import Listing

_REFRESH_S = 1.0


def register(app: typer.Typer) -> None:
    """Adds what this file defines to the command line."""
    app.command("ps", short_help="Jobs of the fleet.")(ps)


def ps(
    ended: Annotated[bool, typer.Option("--all", "-a", help="Ended jobs too.")] = False,
    watch: Watch = False,
    tenant: Annotated[str | None, typer.Option(metavar="TENANT", help="Only this tenant's.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="At most so many, the newest.", min=1, max=10_000)] = 200,
    as_json: AsJson = False,
) -> None:
    """Lists the jobs of the fleet: those that run, those that wait and why, with --all those that have ended.

    A job whose worker does not answer is shown as it was last known, with a question mark.
    """
    from cli.fleet.client import call
    from cli.fleet.overview import list_jobs
    from model.ids import TenantId

    if tenant is not None:
        tenant = TenantId(tenant)

    async def main(fleet: Fleet) -> None:
        async def listing() -> Listing:
            return await list_jobs(fleet, ended=ended, tenant=tenant, limit=limit)

        if watch:
            await _watch(listing, as_json=as_json)
        else:
            _show(await listing(), as_json=as_json)

    call(main)


def jobs_table(listing: Listing, now: datetime) -> Table:
    """The list as people see it."""
    from cli.fleet import words

    made = words.table(
        "JOB", "NAME", "TIER", "PHASE", "RANKS", "STEP", "EPOCH", "NODES", "AGE", "WAITING FOR",
        right=("RANKS", "STEP", "EPOCH", "AGE"), fold=("WAITING FOR",),
    )  # fmt: skip
    for row in listing.rows:
        phase = words.phase(row.phase, held=row.held)
        if row.source == "visibility" and not row.ended:
            phase.append(" ?", style="bold red")
        ranks = "?" if row.ranks is None else str(row.ranks)
        made.add_row(
            row.id,
            row.name,
            words.tier(row.tier),
            phase,
            f"{ranks} on {row.width}" if row.width and str(row.width) != ranks else ranks,
            str(row.step) if row.step or row.epoch else "",
            str(row.epoch) if row.epoch else "",
            " ".join(row.nodes),
            words.duration((now - row.submitted_at).total_seconds()),
            row.waiting,
        )
    return made


def _show(listing: Listing, *, as_json: bool) -> None:
    now = datetime.now(UTC)
    if as_json:
        print_json([row.to_json(now) for row in listing.rows])
        return
    if listing.rows:
        data.print(jobs_table(listing, now))
    else:
        say("no jobs; `ergo submit` starts one, and `ergo ps -a` lists those that have ended")
    _warn(listing)


def _warn(listing: Listing) -> None:
    if listing.unanswered:
        say(f"? no worker has answered for {listing.unanswered} of the jobs: what is shown of them may be old")
    if not listing.nodes_known:
        say("the fleet's store does not answer: steps are those of the last transition")


async def _watch(look: Callable[[], Awaitable[Listing]], *, as_json: bool) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from cli.fleet import words

    if as_json or not data.is_terminal:
        while True:
            found, now = await look(), datetime.now(UTC)
            if as_json:
                print_json([row.to_json(now) for row in found.rows], compact=True)
            else:
                data.print(jobs_table(found, now))
            await asyncio.sleep(_REFRESH_S)
    with Live(console=data, screen=True, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            found, now = await look(), datetime.now(UTC)
            head = Text(f"{words.counted(len(found.rows), 'job')}, {words.clock(now)} UTC; Ctrl-C ends", style="dim")
            live.update(Group(head, Text(), jobs_table(found, now)), refresh=True)
            await asyncio.sleep(_REFRESH_S)
