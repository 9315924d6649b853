"""What was delivered to a job, and how long its level can still be kept: constant work whenever its width changes.

Per guaranteed job the hour is counted from its own admission. With N ranks, level g and d device-seconds delivered in
the hour that ends at W, it is owed ``g N 3600 - d``, and its slack at t is ``(W - t) - owed / N``: how long it may have
no device and still make it at full width. At width n the slack is used up at ``t + slack / (1 - n / N)``, its
zero-slack time (facts/scheduling.md §4.1).
"""

from __future__ import annotations

from math import inf, log

from scheduling.core.model import Job, State, Tenant
from scheduling.core.settings import HOUR_S, LEVELS, Settings

SHORT_HOUR_S = 600.0
"""Of a job's last hour less than this is not counted: nobody can keep a level over seconds."""


def accrue(job: Job, now: float) -> None:
    """Counts what was delivered up to `now`; closes the hours that have ended. The hour of a held job stands still."""
    start = job.at
    if now <= start or job.state is State.HELD:
        return
    if job.admitted is not None:
        while now >= job.window_end:
            job.delivered += job.rate * (job.window_end - max(start, job.window_start))
            start = max(start, job.window_end)
            close_hour(job, HOUR_S)
            job.window_start = job.window_end
            job.window_end += HOUR_S
            job.delivered = 0.0
        job.delivered += job.rate * (now - max(start, job.window_start))
    job.served += job.rate * (now - job.at)
    job.at = now


def close_hour(job: Job, length_s: float) -> None:
    """Counts one hour, or the last part of one, and whether it lacked more than its level allows in an hour."""
    job.hours += 1
    allowed = (1.0 - LEVELS[job.ask.tier]) * job.ranks * HOUR_S
    if job.ranks * length_s - job.delivered > allowed * (1.0 + 1e-6):
        job.below += 1


def admit(job: Job, now: float) -> None:
    """Its level is promised from now on."""
    job.admitted = now
    job.window_start, job.window_end = now, now + HOUR_S
    job.delivered = 0.0


def slack(job: Job, now: float) -> float:
    """Seconds that an admitted job may stand still from `now`; infinite without a promise. Counts up to `now`."""
    if job.admitted is None:
        return inf
    accrue(job, now)
    owed = max(0.0, LEVELS[job.ask.tier] * job.ranks * HOUR_S - job.delivered)
    return (job.window_end - now) - owed / job.ranks


def endurance(job: Job, now: float) -> float:
    """Seconds that it may stand still from `now` without missing any hour: where it has made this hour whatever comes,
    those of the next one too. Infinite without a promise.
    """
    left = slack(job, now)
    if left < job.window_end - now or job.admitted is None:
        return left
    return job.window_end - now + (1.0 - LEVELS[job.ask.tier]) * HOUR_S


def lead_s(job: Job, settings: Settings) -> float:
    """How long before its zero-slack time (s) an admitted job is served whatever it takes: longer, the more of its pool
    it is, since more have to give way; and where nodes are leased, since it may have to leave one at the last moment.
    """
    lead = settings.lead_s(job.rank)
    pool = job.pool
    if pool is None or not pool.devices:
        return lead
    lead *= 1.0 + settings.lead_by_size * job.ranks / pool.devices
    if pool.capacity < pool.devices:
        lead += 4.0 * settings.pause_s
    return min(lead, settings.lead_most * (1.0 - LEVELS[job.rank]) * HOUR_S)


def spares_at(job: Job, now: float, least_s: float, cool_s: float) -> float:
    """From when on a job that runs at full width may stand still for `least_s`, a while after its last change: at once,
    or when it has made its hour. It does not depend on the time at which it is asked, until the job changes.
    """
    cooled = job.changed + cool_s
    left = slack(job, now)
    return cooled if left >= least_s else max(cooled, job.window_end - left)


def zero_slack(job: Job, now: float) -> float:
    """When its slack is used up at the rate at which it is delivered now; infinite if never. Counts up to `now`."""
    short = 1.0 - job.rate / job.ranks
    if job.admitted is None or short <= 0.0:
        return inf
    left = slack(job, now)
    if left <= 0.0:
        return now
    at = now + left / short
    if at < job.window_end:
        return at
    level = LEVELS[job.ask.tier]
    return inf if job.rate >= level * job.ranks else job.window_end + (1.0 - level) * HOUR_S / short


def usage(tenant: Tenant, now: float, half_life_s: float) -> float:
    """Device-seconds that a tenant and those below it have used up to `now`, those of a half-life ago counted half."""
    if now <= tenant.at:
        return tenant.usage
    kept = 0.5 ** ((now - tenant.at) / half_life_s)
    return tenant.usage * kept + tenant.rate * (1.0 - kept) * half_life_s / log(2.0)


def spend(tenant: Tenant | None, now: float, half_life_s: float) -> None:
    """Counts a tenant's use up to `now`, and that of those above it."""
    while tenant is not None:
        tenant.usage, tenant.at = usage(tenant, now, half_life_s), max(tenant.at, now)
        tenant = tenant.parent


def share(tenant: Tenant, now: float, half_life_s: float) -> tuple[float, ...]:
    """By what tenants are ordered among each other: use by weight, of those above it first."""
    own = usage(tenant, now, half_life_s) / tenant.weight
    return (own,) if tenant.parent is None else (*share(tenant.parent, now, half_life_s), own)
