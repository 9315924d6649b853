"""A command with `--wait` says what happens to its job while it waits for the answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from cli.fleet import awaiting
from cli.fleet.client import FleetError
from model.control import DecisionView, JobView, TransitionView
from model.ids import Epoch
from model.job_state import JobPhase
from tests.cli.samples import view

BIG = "Standard job big needs 4 devices."


class Shown:
    """A fleet with one job, which shows one view after the other; None for none. The last one stays."""

    def __init__(self, *views: JobView | None) -> None:
        self.views = list(views)

    async def view(self, job: str) -> JobView:
        shown = self.views.pop(0) if len(self.views) > 1 else self.views[0]
        if shown is None:
            raise FleetError("No worker answers.", code="fleet.no-answer")
        return shown


def preempted() -> tuple[JobView, JobView]:
    before = replace(view("gpt"), transitions=(), decisions=(), waiting="")
    time = before.submitted_at + timedelta(seconds=1)
    suspended = TransitionView(time, JobPhase.SUSPENDED, BIG, Epoch(1))
    decided = (
        DecisionView(time, "preempt", BIG),
        DecisionView(time + timedelta(seconds=1), "resize not done", "Held."),
    )
    return before, replace(
        before, phase=JobPhase.SUSPENDED, transitions=(suspended,), decisions=decided, waiting="It waits for room."
    )


def test_news_are_phases_decisions_and_what_it_waits_for() -> None:
    before, now = preempted()
    phase, decision, wait = awaiting.news(before, now)
    assert phase.endswith(f"UTC  suspended: {BIG}") and decision.endswith("UTC  resize not done: Held.")
    assert wait == "the job waits: It waits for room."
    assert awaiting.news(now, now) == []


async def test_they_are_said_before_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    before, now = preempted()
    said, enough = list[str](), asyncio.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 3:
            enough.set()

    monkeypatch.setattr(awaiting, "say", say)
    monkeypatch.setattr(awaiting, "_LOOK_S", 0.01)

    async def asked() -> str:
        await enough.wait()
        return "done"

    async with asyncio.timeout(30):
        answer = await awaiting.answered(Shown(before, None, before, now), "gpt", asked())  # pyright: ignore[reportArgumentType]
    assert answer == "done" and len(said) == 3


async def test_an_error_of_the_request_is_its_own() -> None:
    async def asked() -> str:
        raise FleetError("Refused.", code="fleet.refused")

    with pytest.raises(FleetError, match="Refused"):
        await awaiting.answered(Shown(None), "gpt", asked())  # pyright: ignore[reportArgumentType]
