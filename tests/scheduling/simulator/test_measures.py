"""Every figure of a report, worked out by hand."""

from __future__ import annotations

import pytest

from scheduling.simulator.measures import QUANTILES, Service, Times, measure, quantile
from tests.scheduling.simulator.outcomes import B, P, S, job, outcome, small


def test_service_levels_are_counted_from_admission_and_from_submission():
    found = measure(small())
    assert found.from_admission == Service(hours=10, below=1, excused=1, short=1)
    assert found.from_admission.missed == 0  # it was excused
    assert found.from_submission == Service(hours=11, below=2)
    assert found.from_submission.missed == pytest.approx(2 / 11)
    assert found.of(P).from_submission == Service(5, 2)
    assert found.of(S).from_admission == Service(6, 0)
    assert found.of(B).from_admission == Service(0, 0) and found.of(B).from_admission.missed == 0


def test_jobs_that_have_not_ended_are_counted_apart():
    found = measure(small())
    assert (found.jobs, found.ended, found.never_started) == (4, 3, 1)
    assert found.completion == Times(3, (120 + 200 + 400) / 3, 200, 400)
    assert (found.of(B).jobs, found.of(B).ended) == (2, 1)
    assert found.waiting_for == (("no node has 1 free device", 1),)


def test_the_wait_for_the_promise():
    found = measure(small())
    assert found.of(P).admission == Times(1, 10, 10, 10) and found.of(P).never_admitted == 0
    assert found.of(B).admission.count == 0 and found.of(B).never_admitted == 2


def test_gpu_fraction_is_weighted_with_devices():
    jobs = [
        job("a", P, 3, admitted=0, started=0, ended=200, asked=100),
        job("b", P, 1, admitted=300, started=300, ended=400, asked=100, submit=100),
        job("c", P, 9, admitted=0, started=0, asked=100),
    ]
    found = measure(outcome(jobs=jobs)).of(P)
    assert found.gpu_fraction == pytest.approx((3 * 100 + 100) / (3 * 200 + 100))
    assert found.gpu_fraction_since_submission == pytest.approx((3 * 100 + 100) / (3 * 200 + 300))
    assert found.fractions[0] == pytest.approx(1 / 3) and found.fractions[-1] == 0.5
    assert len(found.fractions) == len(QUANTILES)


def test_waiting_by_size():
    by_size = {one.devices: one for one in measure(small()).sizes}
    assert list(by_size) == ["1", "2-4", "5-8", "257+"]  # only those that there are
    assert by_size["5-8"].waiting == Times(1, 20, 20, 20)
    assert by_size["1"].waiting == Times(0, None, None, None) and by_size["1"].never_started == 1


def test_allocation():
    found = measure(small())
    assert found.allocation == pytest.approx(0.8)
    assert found.allocation_while_asked == pytest.approx(0.95)
    assert found.allocation_over_time == ((0.0, 0.5, 0), (600.0, 1.0, 3), (1200.0, 1.0, 0))
    assert measure(outcome()).allocation is None and measure(outcome()).allocation_while_asked is None


def test_long_runs_are_thinned_without_losing_a_burst():
    samples = [(600.0 * at, at % 2, 1, 9 if at == 777 else 0) for at in range(10_000)]
    thinned = measure(outcome(samples=samples)).allocation_over_time
    assert len(thinned) <= 300 and thinned[0][0] == 0
    assert all(share == pytest.approx(0.5) for _, share, _ in thinned)
    assert sum(wanted == 9 for *_, wanted in thinned) == 1


def test_operations_and_decisions():
    found = measure(small())
    assert (found.preemptions_per_job, found.resizes_per_job, found.moves_per_job) == (2, 0.5, 0.25)
    assert found.restarts_per_job == 0.25 and found.lost_device_hours == 1
    assert found.preempted == (("0", 2), ("1", 1), ("2", 0), ("3-5", 0), ("6-10", 1), ("11+", 0))
    assert found.decision_all_us == pytest.approx(0.5e6 / 12)
    assert (found.decision_mean_us, found.decision_p99_us) == (50.5, 99)
    assert found.decision_quantiles_us[0] == 1 and found.decision_quantiles_us[-1] == 100


def test_overhead_is_what_devices_did_not_do_for_jobs():
    jobs = [job("a", B, 4, ended=50, asked=20), job("b", B, 1, ended=20, asked=10)]
    assert measure(outcome(jobs=jobs, busy_device_s=100.0)).overhead == pytest.approx(0.1)
    assert measure(outcome(jobs=[*jobs, job("c")], busy_device_s=100.0)).overhead is None  # nobody knows what it did


def test_nothing_happened():
    found = measure(outcome())
    assert found.jobs == found.decisions == 0 and found.decision_mean_us is None and found.sizes == ()


@pytest.mark.parametrize(("share", "value"), [(0, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.99, 4), (1, 4)])
def test_quantile(share, value):
    assert quantile([1, 2, 3, 4], share) == value
