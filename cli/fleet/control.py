"""`ergo preempt`, `resume`, `checkpoint`, `migrate`, `resize` and `cancel`: requests to a job's workflow."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated

import typer

from cli.console import say
from cli.fleet.options import LiveJob, Wait, WithNode
from cli.usage import MOST_RANKS
from model.names import Update

if TYPE_CHECKING:
    from cli.fleet.client import Fleet
    from model.requests import OperationResult

_LOOK_S = 0.5
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it is kept with the job's events.")]


def register(app: typer.Typer) -> None:
    """Adds what this file defines to the command line."""
    app.command("preempt", short_help="Checkpoint a job and stop it until `resume`.")(preempt)
    app.command("resume", short_help="Let a preempted job go on.")(resume)
    app.command("checkpoint", short_help="Checkpoint a job, which runs on.")(checkpoint)
    app.command("migrate", short_help="Move a running job to another node.")(migrate)
    app.command("resize", short_help="Run a job on fewer or more devices.")(resize)
    app.command("cancel", short_help="End a job for good.")(cancel)


def preempt(job: LiveJob, wait: Wait = False, reason: Reason = "") -> None:
    """Checkpoints JOB, ends its processes and gives up its devices. It stays stopped until `ergo resume`."""
    from model.requests import PreemptRequest

    _ask(job, Update.PREEMPT, PreemptRequest(wait=wait, reason=reason), wait=wait)


def resume(job: LiveJob, wait: Wait = False, reason: Reason = "") -> None:
    """Lets JOB go on from where it was stopped, as soon as there are devices. With --wait: until it runs."""
    from model.requests import ResumeRequest

    _ask(job, Update.RESUME, ResumeRequest(wait=wait, reason=reason), wait=wait)


def checkpoint(job: LiveJob, wait: Wait = False, reason: Reason = "") -> None:
    """Takes a checkpoint of JOB, which runs on meanwhile. With --wait: until it is committed."""
    from model.requests import CheckpointRequest

    _ask(job, Update.CHECKPOINT, CheckpointRequest(wait=wait, reason=reason), wait=wait)


def migrate(job: LiveJob, to: WithNode, wait: Wait = False, reason: Reason = "") -> None:
    """Moves JOB to NODE while it runs; if that fails, it runs on where it is. With --wait: until it runs there."""
    from model.requests import MigrateRequest

    _ask(job, Update.MIGRATE, MigrateRequest(to=to, wait=wait, reason=reason), wait=wait, node=to)


def resize(
    job: LiveJob,
    devices: Annotated[
        int,
        typer.Option(
            "--devices", min=1, max=MOST_RANKS, metavar="K", help="On how many; K divides the number of ranks."
        ),
    ],
    wait: Wait = False,
    reason: Reason = "",
) -> None:
    """Has JOB go on on K devices while it runs: on fewer, several of its ranks share one; its numbers stay the same.

    It asks for K devices from then on. If that fails, it runs on as it did. With --wait: until it runs on K.
    """
    from model.requests import ResizeRequest

    _ask(job, Update.RESIZE, ResizeRequest(devices=devices, wait=wait, reason=reason), wait=wait)


def cancel(job: LiveJob, wait: Wait = False, reason: Reason = "") -> None:
    """Ends JOB and everything that belongs to it. With --wait: until none of its processes is left."""
    from model.requests import CancelRequest

    _ask(job, Update.CANCEL, CancelRequest(wait=wait, reason=reason), wait=wait)


def _ask(job: str, update: Update, request: object, *, wait: bool, node: str | None = None) -> None:
    from cli.fleet.awaiting import answered
    from cli.fleet.client import call

    async def main(fleet: Fleet) -> OperationResult:
        if node is not None:
            await check_node(fleet, node)
        await _check_alive(fleet, job, update)
        asked = fleet.ask(job, update, request)
        answer = await (answered(fleet, job, asked) if wait else asked)
        return await _until_running(fleet, job, answer) if wait and update is Update.RESUME else answer

    answer = call(main)
    say(answer.message or f"job {job} is {answer.phase}")
    if not wait:
        say(f"`ergo show {job}` tells how it goes on")


async def _until_running(fleet: Fleet, job: str, answer: OperationResult) -> OperationResult:
    """A workflow that goes on as a new run answers before the job runs; for a resumption that is not the end."""
    import asyncio

    from cli.fleet.client import NoAnswer
    from model.job_state import JobPhase
    from model.requests import OperationResult

    held = False
    while answer.phase is not JobPhase.RUNNING and not answer.phase.ended and not held:
        await asyncio.sleep(_LOOK_S)
        try:
            view = await fleet.view(job)
        except NoAnswer:
            continue
        held = view.held
        answer = OperationResult(view.phase, f"The job is {view.phase}.")
    return answer


async def check_node(fleet: Fleet, name: str) -> None:
    """Checks that a node is there.

    Raises:
        FleetError: ``fleet.unknown-node``; the sentence names those that are.
    """
    from cli.fleet.client import FleetError

    names = [record.node.name for record in await fleet.nodes()]
    if name in names:
        return
    if not names:
        raise FleetError("The fleet has no node.", code="fleet.no-node", remedy="`ergo up` starts some.")
    guesses = difflib.get_close_matches(name, names, 1)
    guess = f"Did you mean {guesses[0]}? " if guesses else ""
    raise FleetError(
        f"There is no node {name}.", code="fleet.unknown-node", remedy=f"{guess}The nodes are {', '.join(names)}."
    )


async def _check_alive(fleet: Fleet, job: str, update: Update) -> None:
    """An ended job is told as such, with how it ended; the server would only say that there is none any more."""
    from cli.fleet.client import JobEnded
    from cli.fleet.overview import row_of_execution

    row = row_of_execution(await fleet.describe(job))
    if row.ended:
        raise JobEnded(
            f"Job {job} has ended ({row.phase}): there is nothing to {update}.",
            remedy=f"`ergo show {job}` tells how it ended.",
        )
