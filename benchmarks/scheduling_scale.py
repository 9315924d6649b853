"""The policy alone at large fleets: in a process of its own, for the sake of its memory."""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

from benchmarks.harness import BenchmarkError
from scheduling.core.actions import Plan
from scheduling.core.book import Book
from scheduling.core.model import Ask
from scheduling.core.planner import Planner
from scheduling.core.settings import BASIC, PREMIUM
from scheduling.simulator.engine import simulate
from scheduling.simulator.measures import measure
from scheduling.simulator.synthetic import Kind, generate
from scheduling.simulator.tiers import TierShares, assign_tiers
from scheduling.simulator.workload import Costs, Failures, FleetShape, TraceJob

NODE = 8
FILL_S, THEN_S = 600.0, 3600.0
FILL, LOAD = 1.1, 0.95  # more than there is, so that jobs wait, shrink and give way
HOUR_S = 3600.0


def storm(devices: int) -> list[TraceJob]:
    """Jobs of ITP's shape: within ten minutes more than the fleet can hold, then an hour of as many as keep it full."""
    sample = generate(Kind.ITP, jobs=20_000, devices=devices, seed=1)
    size = sum(job.devices for job in sample) / len(sample)
    work = sum(job.devices * job.duration_s for job in sample) / len(sample)
    first = round(FILL * devices / size)
    rate = LOAD * devices / work
    jobs = generate(Kind.ITP, jobs=first + round(rate * THEN_S), devices=devices, seed=2)
    given, _ = assign_tiers(jobs, TierShares(20, 40, 40), 0)
    times = (*_evenly(0.0, FILL_S, first), *_evenly(FILL_S, THEN_S, len(jobs) - first))
    return [replace(job, submit_s=at) for job, at in zip(given, times, strict=True)]


def _evenly(begin: float, span: float, count: int) -> Iterator[float]:
    return (begin + span * number / count for number in range(count))


def reclaims(gang: int, nodes: int, times: int) -> list[tuple[float, float]]:
    """Decisions by which a whole gang gets its devices on a fleet that is full of smaller basic jobs.

    Returns:
        Seconds that each took, and seconds of the processor.

    Raises:
        BenchmarkError: it did not get them.
    """
    book = Book()
    planner = Planner(book)
    for index in range(nodes):
        book.add_node(f"node-{index:05}", "pool", f"rack-{index // 16:04}", NODE, 0.0)
    sizes = [job.devices for job in generate(Kind.ITP, jobs=4 * nodes, devices=16, seed=1)]
    for number, size in enumerate(sizes):
        book.submit(Ask(f"basic-{number}", size, BASIC, ("pool",), 0.0, _widths(size)), 0.0)
    now = _settle(book, planner, 0.0)
    found: list[tuple[float, float]] = []
    widths = tuple(NODE * width for width in _widths(gang // NODE))
    for number in range(times):
        now = _settle(book, planner, now + HOUR_S)
        job = book.submit(Ask(f"gang-{number}", gang, PREMIUM, ("pool",), now, widths, NODE), now)
        if book.pools["pool"].free > gang // 2:
            raise BenchmarkError("The fleet was not full: nothing had to be reclaimed.")
        begun = time.perf_counter(), time.thread_time()
        plan = planner.plan(now)
        found.append((time.perf_counter() - begun[0], time.thread_time() - begun[1]))
        _done(book, plan, now + 15.0)
        now = _settle(book, planner, now + 15.0)
        if job.width != gang:
            raise BenchmarkError(f"The gang of {gang} devices got {job.width}.")
        book.finish(job, now)
    return found


def _settle(book: Book, planner: Planner, now: float) -> float:
    """Until nothing is left to decide."""
    while (plan := planner.plan(now)).actions:
        now += 30.0
        _done(book, plan, now)
    return now


def _done(book: Book, plan: Plan, now: float) -> None:
    for action in plan.actions:
        if action.kind == "preempt":
            book.stopped(action.job, now)
        else:
            book.running(action.job, now)


def _widths(size: int) -> tuple[int, ...]:
    return tuple(width for width in range(1, size + 1) if size % width == 0)


def calls(devices: int) -> float:
    """Calls of functions per decision in the same run, the simulator's own with them: work, whatever the machine does
    besides.
    """
    jobs = storm(devices)
    count = 0

    def counted(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # whoever is told of collections is called at other moments in each run
    sys.setprofile(counted)
    try:
        outcome = simulate(jobs, FleetShape(devices // NODE, NODE), "ours", costs=Costs(), failures=Failures(), seed=0)
    finally:
        sys.setprofile(None)
        gc.enable()
    return count / outcome.decisions


def main(devices: int) -> None:
    """Prints figures as JSON."""
    jobs = storm(devices)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    fleet = FleetShape(devices // NODE, NODE)
    outcome = simulate(jobs, fleet, "ours", costs=Costs(), failures=Failures(), seed=0)
    found = measure(outcome)
    print(
        json.dumps(
            {
                "jobs": found.jobs,
                "decisions": found.decisions,
                "mean_us": found.decision_mean_us,
                "all_us": found.decision_all_us,
                "p99_us": found.decision_p99_us,
                "allocated": max(share for _, share, _ in found.allocation_over_time),
                "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "memory_of_the_jobs_bytes": before,
            }
        )
    )
