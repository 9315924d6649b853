"""Outcomes made by hand."""

from __future__ import annotations

from model.job_spec import Tier
from scheduling.simulator.outcome import JobOutcome, Outcome

P, S, B = Tier.PREMIUM, Tier.STANDARD, Tier.BASIC


def job(name, tier=B, devices=1, *, submit=0.0, asked=100.0, admitted=None, started=None, ended=None, **counts):
    return JobOutcome(name, tier, "default", devices, submit, asked, admitted, started, ended, **counts)


def outcome(policy="ours", jobs=(), **fields) -> Outcome:
    return Outcome(policy, list(jobs), **fields)


def small(policy="ours", factor=1.0) -> Outcome:
    """One run with something of everything; `factor` makes jobs late."""
    jobs = [
        job("p1", P, 8, admitted=10, started=20, ended=120 * factor, hours=4, below=1, excused=1, resizes=2, moves=1,
            hours_since_submission=5, below_since_submission=2, lost_device_s=1800, short_below=1),
        job("s1", S, 2, submit=50, admitted=50, started=60, ended=250 * factor, hours=6, below=0, preemptions=1,
            hours_since_submission=6, below_since_submission=0, lost_device_s=1800),
        job("b1", B, 300, submit=100, admitted=None, started=400, ended=500 * factor, preemptions=7, restarts=1),
        job("b2", B, 1, submit=100),
    ]  # fmt: skip
    return outcome(
        policy,
        jobs,
        samples=[(0.0, 5, 10, 0), (600.0, 10, 10, 3), (1200.0, 9, 9, 0)],
        busy_device_s=80.0,
        healthy_device_s=100.0,
        asked_busy_s=19.0,
        asked_healthy_s=20.0,
        decisions=12,
        decision_us=[float(number) for number in range(1, 101)],
        span_s=1800.0,
        cpu_s=2.0,
        policy_cpu_s=0.5,
        reasons={"b2": "no node has 1 free device"},
    )
