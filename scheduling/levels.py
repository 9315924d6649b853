"""Accounts of the live fleet in the core's terms: its clock, its tiers, and what was delivered to a job."""

from __future__ import annotations

from datetime import datetime

from model.job_spec import Tier
from scheduling.core.model import Ask, Job, Tenant
from scheduling.core.service import SHORT_HOUR_S, accrue, close_hour
from scheduling.core.settings import BASIC, PREMIUM, STANDARD
from scheduling.state import JobState, ServiceState

CORE_TIER = {Tier.PREMIUM: PREMIUM, Tier.STANDARD: STANDARD, Tier.BASIC: BASIC}

NOWHERE = ("nowhere",)
"""The pools of a job for which the fleet has no node."""

SAME = (
    "claimed_at", "claim_until", "reserves", "admitted", "promised_in", "window_start", "window_end", "delivered",
    "served", "rate", "at", "changed", "not_before", "waits_since", "hours", "below",
)  # fmt: skip
"""Fields that an account has as a job of the core has them."""


def seconds(time: datetime) -> float:
    """A time as the policy counts it: since 1970."""
    return time.timestamp()


def service_of(job: JobState, now: datetime, *, over: bool = False) -> ServiceState:
    """What was given to one job up to `now`; `over`: it has ended, and its last part of an hour counts."""
    demand, account = job.notice.demand, job.account
    if account is None:
        return ServiceState(demand.tenant, demand.tier, 1)
    known = Job(
        Ask(job.notice.job, demand.max_width, CORE_TIER[demand.tier], NOWHERE, 0.0), Tenant(demand.tenant, None)
    )
    for name in SAME:
        setattr(known, name, getattr(account, name))
    held = job.notice.held and not job.notice.devices  # its hour stands still
    time = account.at if held else max(seconds(now), account.at)
    accrue(known, time)
    if over and known.admitted is not None and time - known.window_start >= SHORT_HOUR_S:
        close_hour(known, time - known.window_start)
    return ServiceState(demand.tenant, demand.tier, 1, known.hours, known.below, round(known.served, 3))
