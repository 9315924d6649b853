"""The scheduler at the size of a small cluster while its worker is killed: `scheduling.live` in little."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.live_history import History, Tick
from benchmarks.scheduling_live import Load, Seen, arrivals, figures, first_jobs, play
from model.control import AddressedDirective, Directive
from model.ids import JobId


def tick(begun: float, ended: float, directives: int = 0) -> Tick:
    told = AddressedDirective(JobId("gpt"), "run", Directive("1", "wait", "Waits.", "levels/1", "0" * 64))
    return Tick(begun, ended, ended, (told,) * directives, 1.0)


def test_what_a_kill_cut_is_apart():
    """The second kill falls between two ticks: the next one had to wait until the worker was back."""
    history = History([tick(0, 1), tick(2, 20, 3), tick(21, 22), tick(40, 41), tick(42, 43)], runs=1)
    assert [one.begun for one in history.whole([5.0, 30.0])] == [0, 21, 42]
    assert history.recoveries([5.0, 30.0]) == [15.0, 11.0]


def test_jobs_are_those_of_the_log():
    load = Load(20.0, 1000, 5000)
    first, later = first_jobs(load), arrivals(load)
    assert len(first) == 5000 and all(job.tier and job.duration_s >= 60 for job in first)
    assert later == sorted(later, key=lambda job: job.submit_s) and 0 < later[-1].submit_s < 1200
    assert len(arrivals(Load(20.0, 100, 500))) < len(later), "a smaller fleet gets less of them"


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_while_the_worker_is_killed(tmp_path: Path):
    load = Load(minutes=40 / 60, nodes=50, jobs=300, kills=2)
    seen, history = asyncio.run(play(tmp_path, load, print))
    assert isinstance(seen, Seen)
    found = {figure.name.removeprefix("scheduling.live."): figure for figure in figures(load, seen, history)}
    assert found["decisions.lost"].value == 0, seen.lost
    assert found["decisions.doubled"].value == 0, seen.doubled
    assert len(seen.kills) == 3 == len(found["recovery"].samples)
    assert history.actions()["place"] >= 100 and seen.arrivals > 10
    assert found["history.events"].holds and found["history.size"].holds and found["payload.largest"].holds
