"""Follows a job to its end: `ergo submit --wait`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import typer

from cli.console import say
from cli.fleet.client import Fleet, NoAnswer, call

if TYPE_CHECKING:
    from model.control import JobView, TransitionView

_LOOK_S = 0.5
CANCELLED_CODE = 130


def follow(job: str) -> int:
    """Tells every change of the job's phase on stderr until it has ended; returns the exit code to end with."""
    try:
        return call(lambda fleet: _follow(fleet, job))
    except typer.Exit:
        say(f"job {job} runs on; `ergo cancel {job}` ends it, `ergo logs {job} -f` follows it")
        raise


def exit_code(view: JobView) -> int:
    """The job's own exit code where it has one: 0, or its program's; else 130 for cancelled and 1 for failed."""
    from model.job_state import JobPhase

    if view.phase is JobPhase.CANCELLED:
        return CANCELLED_CODE
    if view.phase is JobPhase.COMPLETED:
        return 0
    # What the shell cannot carry is 1, as is what failed without a program of the user's having said so.
    return view.exit_code if view.exit_code is not None and 0 < view.exit_code < 256 else 1


def line(change: TransitionView) -> str:
    """One change of phase, for people."""
    from cli.fleet.show import devices, parts
    from cli.fleet.words import milliseconds

    where = f" on {devices(change.devices)}" if change.devices else ""
    stopped = f", stopped for {milliseconds(change.down_ms)}" if change.down_ms is not None else ""
    step = f" at step {int(change.step)}" if change.step else ""
    why = f": {change.reason}" if change.reason else ""
    return f"{change.phase}{where}{step}{stopped}{parts(change.parts_ms)}{why}"


async def _follow(fleet: Fleet, job: str) -> int:
    told: TransitionView | None = None
    waiting, silent = "", ""
    while True:
        try:
            view = await fleet.view(job)
            closed = None if view.phase.ended else await _closed(fleet, job)
        except NoAnswer as error:
            # Whatever is away comes back, and the job does not need it meanwhile.
            if silent != error.message:
                say(f"{error.message} Waiting for it.")
            silent = error.message
            view, closed = None, await _closed_for_sure(fleet, job)
        else:
            silent = ""
            for change in news(view.transitions, told):
                say(line(change))
                told = change
            if view.waiting and view.waiting != waiting and not view.phase.ended:
                say(f"waiting: {view.waiting}")
            waiting = view.waiting
        if view is not None and view.phase.ended:
            if view.failure:
                say(view.failure)
            return exit_code(view)
        if closed is not None:
            return closed
        await asyncio.sleep(_LOOK_S)


async def _closed_for_sure(fleet: Fleet, job: str) -> int | None:
    try:
        return await _closed(fleet, job)
    except NoAnswer:
        return None


def news(transitions: tuple[TransitionView, ...], told: TransitionView | None) -> tuple[TransitionView, ...]:
    """The changes after the one that was told last; the view keeps only the newest of a long life."""
    if told is None or told not in transitions:
        return transitions if told is None else tuple(change for change in transitions if change.time > told.time)
    return transitions[transitions.index(told) + 1 :]


async def _closed(fleet: Fleet, job: str) -> int | None:
    """An exit code where the workflow was ended from outside, so that its own phase never says so."""
    from temporalio.client import WorkflowExecutionStatus

    status = (await fleet.describe(job)).status
    outside = (
        WorkflowExecutionStatus.TERMINATED,
        WorkflowExecutionStatus.TIMED_OUT,
        WorkflowExecutionStatus.CANCELED,
    )
    if status is not None and status in outside:
        say(f"the workflow of job {job} was {status.name.lower().replace('_', ' ')} in Temporal")
        return 1 if status is WorkflowExecutionStatus.TIMED_OUT else CANCELLED_CODE
    return None
