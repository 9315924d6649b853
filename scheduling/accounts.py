"""What was delivered to a job, from what the job itself says: the same for the scheduler and for a reader of events.

A job tells with every change when it happened and what device time it had got until then, net of what was lost with a
node. The account of a job stands at the last such time, or at its admission; what has come since follows from the rate.
So a word that comes late, twice or not at all changes nothing once the next one is there; only which hour a correction
falls into may then be one too late.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from datetime import datetime

from model.control import JobNotice
from model.ids import TenantId
from model.job_spec import Tier
from model.job_state import JobPhase
from scheduling.core.model import Ask, Job, State, Tenant
from scheduling.core.service import SHORT_HOUR_S, accrue, admit, close_hour
from scheduling.core.settings import BASIC, PREMIUM, STANDARD
from scheduling.state import Account, JobState, ServiceState

CORE_TIER = {Tier.PREMIUM: PREMIUM, Tier.STANDARD: STANDARD, Tier.BASIC: BASIC}

NOWHERE = ("nowhere",)
"""The pools of a job for which the fleet has no node."""

_OTHER = frozenset(("state", "claim", "due", "key"))
SAME = tuple(field.name for field in fields(Account) if field.name not in _OTHER)
"""Fields that an account has as a job of the core has them."""

COUNTED = ("admitted", "window_start", "window_end", "delivered", "served", "rate", "at", "hours", "below")
"""Fields of an account that say what was delivered up to `at`; the others are the policy's."""

_SAME_S = 1e-6


@dataclass(frozen=True, slots=True)
class Heard:
    """What a job says of itself at a time. Times in seconds since 1970.

    Attributes:
        at: since when it is so.
        rate: devices that deliver from then on.
        delivered_s: device-seconds that it had got until then; None where nobody knows.
        held: a person holds it, and it has no devices: its hour stands still.
        width: what it asks for; 0 where that is known otherwise. A person may change it.
    """

    at: float
    rate: int
    delivered_s: float | None = None
    held: bool = False
    width: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """A level is promised from a time on."""

    at: float


def seconds(time: datetime) -> float:
    """A time as the policy counts it: since 1970."""
    return time.timestamp()


def heard(notice: JobNotice, now: float) -> Heard:
    """What a notice says of what is delivered."""
    runs = notice.phase is JobPhase.RUNNING
    return Heard(
        now if notice.since is None else min(now, seconds(notice.since)),
        min(len(notice.devices), notice.demand.max_width) if runs else 0,
        None if notice.delivered_ms is None else notice.delivered_ms / 1e3,
        notice.held and not notice.devices,
    )


def follow(account: Account, tier: Tier, width: int, word: Heard) -> Account:
    """The account at the time of `word`, or as it stands where that is later (it was admitted since)."""
    stood = account.state == State.HELD
    at = max(word.at, account.at)
    truth = None if word.delivered_s is None else word.delivered_s + word.rate * (at - word.at)
    known = truth is None or (word.at <= account.at and abs(truth - account.served) < _SAME_S)
    if known and stood == word.held and word.rate == account.rate:
        return account  # nothing new
    if stood:
        if word.held:
            return account
        pause = at - account.at
        account = replace(
            account,
            state=int(State.WAITING),
            window_start=account.window_start + pause,
            window_end=account.window_end + pause,
            at=at,
        )
    job = _job(account, tier, width)
    accrue(job, at)
    if truth is not None:
        if word.at >= account.at:  # else it is of the time before its admission
            job.delivered = max(0.0, job.delivered + truth - job.served)
        job.served = truth
    job.rate = word.rate
    account = _counted(account, job)
    return replace(account, state=int(State.HELD)) if word.held else account


def until(account: Account, tier: Tier, width: int, now: float) -> Account:
    """The account at a later time, if nothing happens until then."""
    if account.state == State.HELD or (not account.rate and (account.admitted is None or now < account.window_end)):
        return account
    job = _job(account, tier, width)
    accrue(job, now)
    return _counted(account, job)


def service(
    tenant: TenantId, tier: Tier, width: int, account: Account | None, now: float, *, over: bool = False
) -> ServiceState:
    """What was given to one job up to `now`; `over`: it has ended, and its last part of an hour counts."""
    if account is None:
        return ServiceState(tenant, tier, 1)
    job = _job(until(account, tier, width, now), tier, width)
    held = account.state == State.HELD
    length = (account.at if held else max(now, job.at)) - job.window_start
    if over and job.admitted is not None and length >= SHORT_HOUR_S:
        close_hour(job, length)
    return ServiceState(tenant, tier, 1, job.hours, job.below, round(job.served, 3))


def service_of(job: JobState, now: datetime, *, over: bool = False) -> ServiceState:
    """What was given to a job of the scheduler's state."""
    demand, account, at = job.notice.demand, job.account, seconds(now)
    if account is not None:
        word = heard(job.notice, at)
        account = follow(account, demand.tier, demand.max_width, word)
        at = word.at if job.notice.phase.ended else at
    return service(demand.tenant, demand.tier, demand.max_width, account, at, over=over)


def rebuilt(
    tenant: TenantId, tier: Tier, words: Iterable[Heard | Admitted], now: float, *, over: bool = False
) -> ServiceState:
    """The same from the words alone, in any order; the last is the job's end where it is `over`."""
    width = 1
    ordered = sorted(words, key=lambda word: (word.at, isinstance(word, Admitted)))
    account: Account | None = None
    for word in ordered:
        if account is None:
            account = Account(int(State.WAITING), at=word.at)
        if isinstance(word, Heard):
            if word.width not in (0, width):  # hours that were over by then are judged by what was asked for in them
                account, width = until(account, tier, width, word.at), word.width
            account = follow(account, tier, width, word)
        elif account.admitted is None:
            job = _job(account, tier, width)
            accrue(job, word.at)
            admit(job, word.at)
            account = _counted(account, job)
    return service(tenant, tier, width, account, ordered[-1].at if over and ordered else now, over=over)


def _job(account: Account, tier: Tier, width: int) -> Job:
    job = Job(Ask("counted", width, CORE_TIER[tier], NOWHERE, 0.0), _NOBODY)
    for name in COUNTED:
        setattr(job, name, getattr(account, name))
    return job


def _counted(account: Account, job: Job) -> Account:
    return replace(account, **{name: getattr(job, name) for name in COUNTED})


_NOBODY = Tenant("nobody", None)
