"""`ergo sla report`: job-hours that missed their level, from the scheduler's state or from the events alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.console import say
from cli.fleet.operate import state_of
from cli.fleet.options import AsJson, print_json, print_table

if TYPE_CHECKING:
    from cli.fleet.client import Fleet
    from events.types import Event
    from model.ids import TenantId
    from model.job_spec import Tier
    from scheduling.accounts import Admitted, Heard
    from scheduling.state import ClusterState, ServiceState


def register(app: typer.Typer) -> None:
    """Adds what this file defines to the command line."""
    sla = typer.Typer(help="Service levels.", no_args_is_help=True)
    app.add_typer(sla, name="sla", short_help="Service levels kept and missed.")
    sla.command("report", short_help="Job-hours below their level, by tenant and tier.")(report)


def report(
    from_events: Annotated[
        bool, typer.Option("--from-events", help="Counted anew from the events on Kafka, without the scheduler.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Job-hours of all jobs, ended and not, in which a level was promised, and those that missed it.

    Hours are counted from each job's admission; time in which a person held a job is not. Device-hours are what was
    delivered: pauses for moves and restarts, and what was lost with a node, are not in them. The figures are the
    scheduler's own, from its newest state; with --from-events they are made of the events alone, and are the same.
    """
    from cli.fleet import words
    from cli.fleet.client import call

    async def main(fleet: Fleet) -> None:
        now = datetime.now(UTC)
        rows = await _of_events(fleet, now) if from_events else services(await state_of(fleet), now)
        if as_json:
            print_json([_service_json(row) for row in rows])
            return
        right = ("JOBS", "JOB-HOURS", "BELOW", "SHARE", "DEVICE-HOURS")
        made = words.table("TENANT", "TIER", "LEVEL", *right, right=("LEVEL", *right))
        for row in rows:
            promised = level_of(row) > 0
            made.add_row(
                row.tenant,
                words.tier(row.tier),
                f"{level_of(row):.0%}" if promised else "",
                str(row.jobs),
                str(row.hours) if promised else "",
                str(row.below) if promised else "",
                f"{row.below / row.hours:.1%}" if row.hours else "",
                f"{row.served_s / 3600:.2f}",
            )
        if rows:
            print_table(made)
        else:
            say("there has been no job yet")

    call(main)


def services(state: ClusterState, now: datetime) -> list[ServiceState]:
    """What was given, by tenant and tier: to jobs that have ended, and to those that have not up to `now`."""
    from scheduling.accounts import service_of

    found: dict[tuple[str, str], ServiceState] = {(item.tenant, item.tier): item for item in state.service}
    for job in state.jobs:
        _add(found, service_of(job, now))
    return _sorted(found)


@dataclass(slots=True)
class _Told:
    """What the events say of one job."""

    tenant: TenantId
    tier: Tier | None = None
    words: list[Heard | Admitted] = field(default_factory=list["Heard | Admitted"])
    over: bool = False


def services_of_events(events: Iterable[Event], now: datetime) -> tuple[list[ServiceState], int]:
    """The same as `services`, from all events of jobs and decisions; and how many jobs are left out.

    These are of a build whose events did not tell enough. Events come as `events.consumer` lets them pass.
    """
    from events.types import DecisionMade, JobPhaseChanged
    from model.job_state import JobPhase
    from scheduling.accounts import Admitted, Heard, rebuilt, seconds

    jobs: dict[tuple[str, str], _Told] = {}
    for event in events:
        if not isinstance(event, JobPhaseChanged | DecisionMade):
            continue
        told = jobs.setdefault((event.subject, event.id.first_execution_run), _Told(event.tenant))
        if isinstance(event, DecisionMade):
            if event.data.admitted_at is not None:
                told.words.append(Admitted(seconds(event.data.admitted_at)))
            continue
        data = event.data
        told.tier = data.tier or told.tier
        held, asked = len(data.placement.devices) if data.placement else 0, data.width or 0
        rate = min(held, asked) if data.after is JobPhase.RUNNING else 0
        delivered_s = None if data.delivered_ms is None else data.delivered_ms / 1e3
        told.words.append(Heard(seconds(event.time), rate, delivered_s, data.held and not held, asked))
        told.over = told.over or data.after.ended
    found: dict[tuple[str, str], ServiceState] = {}
    for told in jobs.values():
        if told.tier is not None:
            given = rebuilt(told.tenant, told.tier, told.words, seconds(now), over=told.over)
            _add(found, given)
    return _sorted(found), sum(told.tier is None for told in jobs.values())


async def _of_events(fleet: Fleet, now: datetime) -> list[ServiceState]:
    import asyncio

    from events.consumer import EventReader

    def read() -> tuple[list[ServiceState], int]:
        reader = EventReader(fleet.settings.kafka(), client_id="ergo-sla")
        return services_of_events((record.event for record in reader.read()), now)

    rows, left_out = await asyncio.to_thread(read)
    if left_out:
        say(f"{left_out} jobs of an earlier build are left out: their events do not say what they asked for")
    return rows


def _add(found: dict[tuple[str, str], ServiceState], given: ServiceState) -> None:
    before = found.get((given.tenant, given.tier))
    found[given.tenant, given.tier] = given if before is None else before.plus(given)


def _sorted(found: dict[tuple[str, str], ServiceState]) -> list[ServiceState]:
    from model.job_spec import Tier

    tiers = list(Tier)
    return sorted(found.values(), key=lambda item: (item.tenant, tiers.index(item.tier)))


def level_of(row: ServiceState) -> float:
    """The share of its device time that a tier is promised in every hour; 0 for none."""
    from scheduling.accounts import CORE_TIER
    from scheduling.core.settings import LEVELS

    return LEVELS[CORE_TIER[row.tier]]


def _service_json(row: ServiceState) -> dict[str, Any]:
    return {
        "tenant": row.tenant,
        "tier": row.tier,
        "level": level_of(row) or None,
        "jobs": row.jobs,
        "job_hours": row.hours,
        "job_hours_below": row.below,
        "device_hours": round(row.served_s / 3600, 4),
    }
