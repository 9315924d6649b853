"""What must hold of any run, whatever the policy does: checked from outside, on what came of it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.leftover import shortest_first
from model.job_spec import Tier
from scheduling.simulator.engine import simulate
from scheduling.simulator.measures import measure
from scheduling.simulator.policies import POLICIES
from scheduling.simulator.synthetic import Kind, generate
from scheduling.simulator.tiers import TierShares, assign_tiers
from scheduling.simulator.workload import Costs, Failures, FleetShape, TraceJob

FLEET = FleetShape(nodes=12, devices_per_node=8)
LEASING = replace(FLEET, spot_nodes=3)
BREAKING = Failures(seed=1, node_mtbf_s=5 * 86_400.0, spot_lease_s=6 * 3600.0)
SHARES = TierShares(20, 40, 40)
EPSILON = 1e-3


def storm(count, seed, load=1.0):
    jobs, _ = assign_tiers(generate(Kind.ITP, jobs=count, devices=FLEET.devices, load=load, seed=seed), SHARES, seed)
    return jobs


def run(jobs, policy, fleet=FLEET, failures=None, costs=None, seed=0):
    return simulate(jobs, fleet, policy, costs=costs or Costs(), failures=failures or Failures(), seed=seed)


@pytest.mark.parametrize("failures", [None, BREAKING], ids=["healthy", "breaking"])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_time_is_made_and_none_disappears(policy, failures):
    jobs = storm(250, seed=3)
    fleet = LEASING if failures else FLEET
    found = run(jobs, policy, fleet, failures)
    asked = {job.id: job for job in jobs}
    assert sorted(job.id for job in found.jobs) == sorted(asked)
    for job in found.jobs:
        of = asked[job.id]
        assert (job.devices, job.tier, job.asked_s) == (of.devices, of.tier, of.duration_s)
        assert job.started_s is not None and job.ended_s is not None, (job.id, found.reasons.get(job.id))
        assert job.submit_s == pytest.approx(of.submit_s)
        assert job.submit_s <= job.started_s
        assert job.ended_s - job.started_s >= job.asked_s - EPSILON  # nobody is faster than alone at full width
        assert 0 <= job.excused <= job.below <= job.hours
        assert 0 <= job.below_since_submission <= job.hours_since_submission
        assert job.hours_since_submission <= (job.ended_s - job.submit_s) / 3600 + 1
        if job.tier is Tier.BASIC:
            assert job.admitted_s is None and job.hours == 0
        if job.admitted_s is not None:
            assert job.submit_s <= job.admitted_s <= job.ended_s
            assert job.hours <= (job.ended_s - job.admitted_s) / 3600 + 1
        if failures is None and not POLICIES[policy].kills:
            assert job.restarts == 0 and job.lost_device_s == 0
    work = sum(job.devices * job.asked_s + job.lost_device_s for job in found.jobs)
    assert work <= found.busy_device_s * (1 + 1e-9)
    assert found.busy_device_s <= found.healthy_device_s <= fleet.devices * found.span_s * (1 + 1e-9)
    assert found.asked_busy_s <= found.asked_healthy_s <= found.healthy_device_s
    assert all(used <= healthy <= fleet.devices for _, used, healthy, _ in found.samples)
    assert all(before[0] < after[0] for before, after in pairwise(found.samples))
    assert found.span_s == pytest.approx(max(job.ended_s or 0.0 for job in found.jobs))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_again(policy):
    jobs = storm(120, seed=5)

    def figures():
        found = measure(run(jobs, policy, LEASING, BREAKING))
        return replace(
            found,
            cpu_s=0,
            policy_cpu_s=0,
            decision_all_us=0,
            decision_mean_us=0,
            decision_p99_us=0,
            decision_quantiles_us=(),
        )

    assert figures() == figures()


def line(*of):
    return [
        TraceJob(f"j{number}", float(submit), float(duration), devices, tier=Tier.BASIC)
        for number, (submit, duration, devices) in enumerate(of)
    ]


def ends(found):
    return [job.ended_s for job in sorted(found.jobs, key=lambda job: job.id)]


def test_fifo_by_hand():
    """The second waits for the whole fleet; the third would fit beside the first and must wait behind the second."""
    jobs, free = line((0, 100, 2), (1, 50, 4), (2, 10, 1)), Costs(resize_s=0, start_s=0)
    small = FleetShape(1, 4)
    assert ends(run(jobs, "fifo", small, costs=free)) == [100, 150, 160]
    assert ends(run(jobs, "backfill", small, costs=free)) == [100, 150, 12]


def test_fifo_starts_in_the_order_of_submission():
    found = run(storm(200, seed=2), "fifo")
    starts = [job.started_s for job in sorted(found.jobs, key=lambda job: job.submit_s)]
    assert starts == sorted(starts)


def test_backfill_is_not_slower_than_fifo_and_srtf_is_the_fastest():
    jobs = storm(300, seed=7, load=1.2)
    mean = {policy: measure(run(jobs, policy)).completion.mean_s for policy in ("fifo", "backfill", "srtf")}
    assert mean["fifo"] > mean["backfill"] > mean["srtf"]


def test_srtf_is_near_the_oracle_without_places():
    rng = random.Random(1)
    jobs = line(*((rng.uniform(0, 80_000), rng.uniform(1_000, 9_000), 1) for _ in range(120)))
    found = run(jobs, "srtf", FleetShape(1, 8), costs=Costs(resize_s=0, start_s=0))
    mean = measure(found).completion.mean_s
    best = shortest_first(jobs, [], 8)
    assert mean == pytest.approx(sum(best) / len(best), rel=0.02)


def test_costs_cost():
    jobs = storm(200, seed=4)
    cheap, dear = (measure(run(jobs, "ours", costs=Costs(resize_s=pause, start_s=pause))) for pause in (1.0, 120.0))
    assert cheap.overhead < dear.overhead


def test_failures_cost():
    jobs = storm(200, seed=4)
    healthy, breaking = measure(run(jobs, "ours")), measure(run(jobs, "ours", LEASING, BREAKING))
    assert healthy.lost_device_hours == 0 < breaking.lost_device_hours
    assert breaking.restarts_per_job > 0


def test_a_promise_is_kept_where_there_is_room():
    """A fleet with twice the devices that are asked for at any time: nobody waits, nothing is done to anybody."""
    jobs = [TraceJob(f"j{number}", number * 5_000.0, 7_200.0, 16, tier=list(Tier)[number % 3]) for number in range(30)]
    found = measure(run(jobs, "ours"))
    assert found.from_submission.below == 0 and found.from_submission.hours == 40
    assert found.preemptions_per_job == found.resizes_per_job == found.moves_per_job == 0
