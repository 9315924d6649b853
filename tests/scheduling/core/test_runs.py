"""Whole simulated runs: guarantees that were given are kept, and neither a restart nor a hash seed changes anything."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys

import pytest

from model.job_spec import Tier
from scheduling.core.actions import Plan
from scheduling.core.planner import Planner
from scheduling.core.record import record, restore
from scheduling.simulator.engine import Run, simulate
from scheduling.simulator.outcome import Outcome
from scheduling.simulator.workload import Costs, Failures, FleetShape, TraceJob
from tests.scheduling.core.world import dump

FLEET = FleetShape(12, 8, nodes_per_rack=4)
FAILING = Failures(seed=3, node_mtbf_s=5 * 86400.0, spot_lease_s=6 * 3600.0)


def trace(seed: int, jobs: int = 150, load: float = 1.0, units: bool = False) -> list[TraceJob]:
    """Jobs as they are in the traces: many small, the time in the large; all tiers."""
    rng = random.Random(seed)
    made: list[TraceJob] = []
    at = 0.0
    for number in range(jobs):
        devices = rng.choices((1, 2, 4, 8, 16, 32), (60, 8, 10, 16, 4, 2))[0]
        duration = min(rng.lognormvariate(8.6, 1.2), 2 * 86400.0)
        tier = rng.choices((Tier.PREMIUM, Tier.STANDARD, Tier.BASIC), (2, 4, 4))[0]
        unit = min(devices, rng.choice((1, 4, 8))) if units else 1
        made.append(TraceJob(f"job-{number}", at, duration, devices, f"t{number % 3}", tier, unit))
        at += rng.expovariate(load / 300.0)
    return made


class Restarted(Run):
    """At random instants the scheduler is killed, and goes on from its record."""

    def __init__(self, rng: random.Random, share: float, *arguments) -> None:
        super().__init__(*arguments)
        self.restarts, self.digest = 0, hashlib.sha256()
        self._rng, self._share = rng, share
        self._planner = Planner(self.book)
        self.policy.plan = self.plan

    def plan(self, now: float) -> Plan:
        if self._rng.random() < self._share:
            self.restarts += 1
            self.book = restore(record(self.book))
            self._planner = Planner(self.book)
            for running in self.jobs.values():
                running.job = self.book.jobs[running.trace.id]
        plan = self._planner.plan(now)
        self.digest.update(dump(plan).encode())
        return plan


def run(seed: int, share: float, units: bool = False) -> tuple[Restarted, Outcome]:
    """A run in which so many of the plans are made by a scheduler that has just been started."""
    fleet = FleetShape(12, 8, nodes_per_rack=4, spot_nodes=2)
    made = Restarted(
        random.Random(1), share, trace(seed, units=units), fleet, "ours", Costs(), FAILING, seed, None, None
    )
    return made, made.run()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_restart_changes_nothing(seed):
    (whole, expected), (restarted, outcome) = run(seed, 0.0, seed == 2), run(seed, 0.3, seed == 2)
    assert restarted.restarts > 50 and not whole.restarts
    assert outcome.jobs == expected.jobs
    assert restarted.digest.digest() == whole.digest.digest()
    assert all(job.ended_s is not None for job in outcome.jobs)


def test_plans_are_the_same_in_every_process():
    digests = set[str]()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.scheduling.core.test_runs"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout.strip())
    assert digests == {run(4, 0.1)[0].digest.hexdigest()}


@pytest.mark.parametrize("seed", range(3))
def test_every_level_that_was_promised_is_kept(seed):
    outcome = simulate(trace(seed, jobs=400, load=2.0), FLEET, "ours", seed=seed)
    assert sum(job.hours for job in outcome.jobs) > 600
    assert [job.id for job in outcome.jobs if job.below] == []
    assert all(job.ended_s is not None for job in outcome.jobs)


def test_whoever_gives_way_does_so_for_somebody_who_is_then_placed():
    """Where nothing fails: every claim for which others gave way is redeemed, once they have."""
    made = Restarted(
        random.Random(1), 0.0, trace(5, jobs=300, load=2.0), FLEET, "ours", Costs(), Failures(), 5, None, None
    )
    asked: dict[str, float] = {}
    served = 0
    decide = made.policy.plan

    def plan(now: float) -> Plan:
        nonlocal served
        found = decide(now)
        for action in found.actions:
            if action.why[0] == "held":
                served += asked.pop(action.job.id, None) is not None
        for action in found.actions:
            if action.beneficiary is not None:
                asked.setdefault(action.beneficiary.id, now)
        overdue = {name for name, since in asked.items() if now - since > made.book.settings.hold_s}
        assert not overdue & set(made.book.jobs)
        return found

    made.policy.plan = plan
    outcome = made.run()
    assert served > 50
    assert {job.id for job in outcome.jobs if job.ended_s is None} == set()


def test_node_failures_cost_only_what_they_must():
    outcome = simulate(trace(7), FLEET, "ours", failures=FAILING, seed=7)
    assert sum(job.restarts for job in outcome.jobs) > 0
    assert sum(job.below - job.excused for job in outcome.jobs) == 0
    assert all(job.ended_s is not None for job in outcome.jobs)


if __name__ == "__main__":
    print(run(4, 0.1)[0].digest.hexdigest())
