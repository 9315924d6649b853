"""Ten jobs of three tiers arrive over two minutes: the events keep the laws of the policy, and every bit is right."""

from __future__ import annotations

import itertools
import time

import pytest

from events.types import DecisionMade, Event, JobPhaseChanged
from model.job_state import JobPhase
from tests.fleet.harness import require_right, require_whole, submit_gpt

pytestmark = pytest.mark.slow

GAP_S = 12.0
SCRIPT = ("--steps", "150", "--d-model", "64", "--layers", "2", "--sync-every", "1", "--log-every", "0")
LONG = ("--steps", "500", "--sync-every", "1", "--log-every", "0")
JOBS = (
    ("basic", 2, LONG), ("basic", 2, LONG), ("premium", 4, SCRIPT), ("basic", 1, SCRIPT), ("standard", 2, SCRIPT),
    ("standard", 1, SCRIPT), ("basic", 4, SCRIPT), ("premium", 2, SCRIPT), ("standard", 2, SCRIPT),
    ("premium", 1, SCRIPT),
)  # fmt: skip
"""Tiers, ranks and scripts, in the order of arrival; the fleet has four devices."""

RANK = {"premium": 0, "standard": 1, "basic": 2}


@pytest.mark.timeout(1200)
def test_ten_jobs_of_three_tiers(fleet, tmp_path, untouched):
    jobs: dict[str, tuple[str, int]] = {}
    for number, (tier, ranks, script) in enumerate(JOBS):
        options = ("--tier", tier, "--ranks", str(ranks), "--checkpoint-every", "30")
        jobs[submit_gpt(fleet, tmp_path, f"ten-{number}", options, script)] = tier, ranks
        time.sleep(GAP_S)
    for number, (job, (_, ranks, script)) in enumerate(zip(jobs, JOBS, strict=True)):
        fleet.until(lambda job=job: fleet.show(job).phase.ended, f"{job} ends", 600.0)
        (tmp_path / f"out-{number}").mkdir()
        require_right(fleet, job, tmp_path / f"out-{number}", untouched, ranks, script)
    told = {job: fleet.events(job) for job in jobs}
    for events in told.values():
        require_whole(events)
    _gangs_are_whole_and_devices_are_exclusive(told, jobs)
    _who_gives_way_is_below_who_needs_it(told, jobs)
    rows = fleet.ergo("sla", "report", "--json")
    assert '"premium"' in rows and '"basic"' in rows


def _held(events: list[Event]) -> list[tuple[float, float, tuple[str, ...]]]:
    """When a job held which devices, by its own events."""
    found = []
    changes = [event for event in events if isinstance(event, JobPhaseChanged)]
    for event, following in itertools.pairwise(changes):
        if event.data.placement is not None:
            devices = tuple(str(device) for device in event.data.placement.devices)
            found.append((event.time.timestamp(), following.time.timestamp(), devices))
    return found


def _gangs_are_whole_and_devices_are_exclusive(told, jobs) -> None:
    spans: dict[str, list[tuple[float, float, str]]] = {}
    for job, events in told.items():
        for start, end, devices in _held(events):
            assert jobs[job][1] % len(devices) == 0, f"{job} has {devices}"
            for device in devices:
                spans.setdefault(device, []).append((start, end, job))
    for device, held in spans.items():
        for (_, end, one), (start, _, other) in itertools.pairwise(sorted(held)):
            assert one == other or start >= end, f"{device}: {one} until {end}, {other} from {start}"


def _who_gives_way_is_below_who_needs_it(told, jobs) -> None:
    """By stopping or by shrinking; and whom it is for gets a place: nobody is disturbed in vain."""
    gave_way = 0
    for job, events in told.items():
        for event in events:
            if not isinstance(event, DecisionMade) or event.data.action not in ("preempt", "resize"):
                continue
            reason = event.data.reason
            found = [other for other in jobs if f" job {other} needs " in reason]
            if event.data.action == "resize" and not found:
                continue  # it grows into what is idle
            (needs,) = found
            gave_way += 1
            assert RANK[jobs[needs][0]] <= RANK[jobs[job][0]], reason
            starts = [
                item.time
                for item in told[needs]
                if isinstance(item, JobPhaseChanged) and item.data.after is JobPhase.STARTING
            ]
            assert any(time > event.time for time in starts), f"{needs} did not start after: {reason}"
    assert gave_way, "the premium gang has found the fleet full"
