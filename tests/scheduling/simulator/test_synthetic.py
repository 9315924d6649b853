"""Made-up jobs and made-up tiers: the same from the same seed, in the shapes that they claim."""

from __future__ import annotations

from collections import Counter

import pytest

from model.errors import ModelError
from model.job_spec import Tier
from scheduling.simulator.synthetic import KALOS_GPU_TIME, KALOS_JOBS, Kind, generate
from scheduling.simulator.tiers import TierShares, assign_tiers
from scheduling.simulator.workload import TraceJob


def jobs_named(count):
    return [TraceJob(f"job-{number}", 0.0, 1.0, 1) for number in range(count)]


def test_tiers_depend_on_id_and_seed_alone():
    shares = TierShares.parse("20,40,40")
    jobs = jobs_named(5_000)
    given, made_up = assign_tiers(jobs, shares, seed=1)
    assert made_up == len(jobs)
    by_id = {job.id: job.tier for job in given}
    backwards, _ = assign_tiers(jobs[::-7], shares, seed=1)
    assert all(by_id[job.id] == job.tier for job in backwards)
    assert by_id != {job.id: job.tier for job in assign_tiers(jobs, shares, seed=2)[0]}
    counts = Counter(by_id.values())
    assert counts[Tier.PREMIUM] / 5_000 == pytest.approx(0.2, abs=0.02)
    assert counts[Tier.BASIC] / 5_000 == pytest.approx(0.4, abs=0.02)


def test_tiers_of_the_trace_stay():
    jobs = [TraceJob("a", 0, 1, 1, tier=Tier.PREMIUM), TraceJob("b", 0, 1, 1)]
    given, made_up = assign_tiers(jobs, TierShares.parse("0,0,100"), seed=0)
    assert [job.tier for job in given] == [Tier.PREMIUM, Tier.BASIC] and made_up == 1


@pytest.mark.parametrize("text", ["20,40", "20,40,41", "a,b,c", "-1,50,51", "", "nan,50,50", "20;40;40"])
def test_shares_that_are_none(text):
    with pytest.raises(ModelError, match="make up 100") as caught:
        TierShares.parse(text)
    assert caught.value.code == "simulate.tiers"


def gpu_time(jobs, chosen):
    return sum(job.devices * job.duration_s for job in jobs if chosen(job)) / sum(
        job.devices * job.duration_s for job in jobs
    )


def test_itp():
    jobs = generate(Kind.ITP, jobs=20_000, devices=576, load=0.85, seed=3)
    assert jobs == generate(Kind.ITP, jobs=20_000, devices=576, load=0.85, seed=3)
    assert jobs != generate(Kind.ITP, jobs=20_000, devices=576, load=0.85, seed=4)
    assert jobs[0].submit_s == 0 and [job.submit_s for job in jobs] == sorted(job.submit_s for job in jobs)
    assert len({job.id for job in jobs}) == len(jobs)
    asked = sum(job.devices * job.duration_s for job in jobs)
    assert asked / 576 / jobs[-1].submit_s == pytest.approx(0.85)
    # As measured in the logs: mean 19,591 s; 47.5 % of GPU time in jobs of 8 devices, 42.4 % in larger ones.
    assert sum(job.duration_s for job in jobs) / len(jobs) == pytest.approx(19_591, rel=0.08)
    assert gpu_time(jobs, lambda job: job.devices == 8) == pytest.approx(0.475, abs=0.06)
    assert gpu_time(jobs, lambda job: job.devices > 8) == pytest.approx(0.424, abs=0.06)
    hours = Counter(int(job.submit_s // 3600) for job in jobs)
    mean = len(jobs) / (jobs[-1].submit_s / 3600)
    assert max(hours.values()) > 5 * mean  # bursts


def test_llm_has_kalos_tail():
    jobs = generate(Kind.LLM, jobs=40_000, devices=8_192, seed=5)
    for size, percent in KALOS_JOBS:
        share = sum(job.devices <= size for job in jobs) / len(jobs)
        assert share == pytest.approx(percent / 100, abs=0.01)
    for size, percent in KALOS_GPU_TIME:
        assert gpu_time(jobs, lambda job, size=size: job.devices <= size) == pytest.approx(percent / 100, abs=0.12)


def test_no_job_is_larger_than_the_fleet():
    assert max(job.devices for job in generate(Kind.LLM, jobs=3_000, devices=100)) == 64
    assert {job.devices for job in generate(Kind.ITP, jobs=10, devices=1)} == {1}


@pytest.mark.parametrize("given", [{"jobs": 0}, {"devices": 0}, {"load": 0}, {"load": float("nan")}])
def test_nonsense_is_refused(given):
    with pytest.raises(ModelError, match="cannot be made up"):
        generate(Kind.ITP, **({"jobs": 1, "devices": 1, "load": 0.5} | given))
