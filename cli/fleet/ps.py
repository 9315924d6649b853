"""`ergo ps`: the jobs of the fleet."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import usage
from cli.console import say
from cli.fleet.options import AsJson, Watch, print_json, print_table

if TYPE_CHECKING:
    from rich.table import Table

    from cli.fleet.client import Fleet
    from cli.fleet.overview import Listing


def register(app: typer.Typer) -> None:
    """Adds what this file defines to the command line."""
    app.command("ps", short_help="Jobs of the fleet.")(ps)


def ps(
    ended: Annotated[bool, typer.Option("--all", "-a", help="Ended jobs too.")] = False,
    watch: Watch = False,
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Only this tenant's.", callback=usage.tenant)
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="At most so many, the newest.", min=1, max=10_000)] = 200,
    as_json: AsJson = False,
) -> None:
    """Lists the jobs of the fleet: those that run, those that wait and why, with --all those that have ended.

    A job whose worker does not answer is shown as it was last known, with a question mark.
    """
    from cli.fleet import watching, words
    from cli.fleet.client import call
    from cli.fleet.overview import list_jobs

    async def main(fleet: Fleet) -> None:
        async def listing() -> Listing:
            return await list_jobs(fleet, ended=ended, tenant=tenant, limit=limit)

        if watch:
            await watching.watch(
                listing,
                table=lambda found: jobs_table(found, datetime.now(UTC)),
                head=lambda found: words.counted(len(found.rows), "job"),
                document=document if as_json else None,
            )
        else:
            _show(await listing(), as_json=as_json)

    call(main)


def jobs_table(listing: Listing, now: datetime) -> Table:
    """The list as people see it."""
    from cli.fleet import words
    from cli.fleet.spec import label

    # An id that `ergo submit` has made begins with the name: both would only take room.
    named = any(not row.id.startswith(label(row.name)) for row in listing.rows)
    reasons = any(row.waiting for row in listing.rows)
    head = ["JOB", *(["NAME"] if named else []), "TIER", "PHASE", "RANKS", "STEP", "EPOCH", "NODES", "AGE"]
    made = words.table(
        *head, *(["WAITING FOR"] if reasons else []), right=("RANKS", "STEP", "EPOCH", "AGE"), fold=("WAITING FOR",)
    )
    for row in listing.rows:
        phase = words.phase(row.phase, held=row.held)
        if row.source == "visibility" and not row.ended:
            phase.append(" ?", style="bold red")
        ranks = "own" if row.pack == "node" else "?" if row.ranks is None else str(row.ranks)
        made.add_row(
            row.id,
            *([row.name] if named else []),
            words.tier(row.tier),
            phase,
            f"{ranks} on {row.width}" if row.width and str(row.width) != ranks else ranks,
            str(row.step) if row.step is not None and (row.step or row.epoch) else "",
            str(row.epoch) if row.epoch else "",
            " ".join(row.nodes),
            words.age((now - row.submitted_at).total_seconds()),
            *([row.waiting] if reasons else []),
        )
    return made


def document(listing: Listing) -> list[dict[str, Any]]:
    """The list as programs see it."""
    now = datetime.now(UTC)
    return [row.to_json(now) for row in listing.rows]


def _show(listing: Listing, *, as_json: bool) -> None:
    if as_json:
        print_json(document(listing))
    elif listing.rows:
        print_table(jobs_table(listing, datetime.now(UTC)))
    else:
        say("no jobs; `ergo submit` starts one, and `ergo ps -a` lists those that have ended")
    _warn(listing)


def _warn(listing: Listing) -> None:
    if listing.unanswered:
        say(f"? no worker has answered for {listing.unanswered} of the jobs: what is shown of them may be old")
    if not listing.nodes_known:
        say("the fleet's store does not answer: steps are those of the last transition")
