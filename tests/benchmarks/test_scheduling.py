"""What the benchmarks of the scheduler plan, worked out by hand; nothing is timed here."""

from __future__ import annotations

import pytest

from benchmarks.scheduling import promised
from benchmarks.scheduling_scale import FILL, calls, reclaims, storm
from model.job_spec import Tier
from scheduling.simulator.workload import TraceJob


def job(submit, duration, devices, tier):
    return TraceJob(f"{submit}-{devices}", float(submit), float(duration), devices, tier=tier)


@pytest.mark.parametrize(("share", "devices"), [(0.5, 9.5), (0.79, 9.5), (0.81, 16.5), (1.0, 16.5)])
def test_what_would_be_promised(share, devices):
    """For 100 s 10 premium devices; for 20 of these 10 standard ones besides; basic ones are promised nothing."""
    jobs = [job(0, 100, 10, Tier.PREMIUM), job(50, 20, 10, Tier.STANDARD), job(0, 100, 99, Tier.BASIC)]
    assert promised(jobs, share) == pytest.approx(devices)


def test_a_storm_asks_for_more_than_there_is():
    jobs = storm(800)
    first = sum(job.devices for job in jobs if job.submit_s < 600)
    assert first == pytest.approx(FILL * 800, rel=0.15)
    assert all(job.tier for job in jobs) and jobs[-1].submit_s < 4_200
    assert [job.submit_s for job in jobs] == sorted(job.submit_s for job in jobs)


def test_a_gang_gets_what_it_takes_from_others():
    took = reclaims(gang=32, nodes=20, times=3)
    assert len(took) == 3 and all(wall > 0 and processor > 0 for wall, processor in took)


def test_work_is_counted_and_does_not_depend_on_the_machine():
    assert calls(80) == calls(80) > 100
