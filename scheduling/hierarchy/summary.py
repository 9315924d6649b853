"""What a cluster tells the level above: counts, and a few jobs that would be better off elsewhere; some 4 KB."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import nsmallest

from scheduling.core.book import Book
from scheduling.core.model import Ask, Job, Pool, State
from scheduling.core.settings import LENT

CANDIDATES = 16
"""So many jobs are named in a summary, those that wait longest first."""


@dataclass(frozen=True, slots=True)
class PoolSummary:
    """One accelerator type of a member.

    Attributes:
        gangs: (free devices, how many open nodes have so many), ascending: what fits side by side.
        room: devices times level that may still be promised; `low` devices of jobs without a promise.
        backlog: devices that waiting jobs ask for, by tier.
    """

    key: str
    devices: int
    free: int
    gangs: tuple[tuple[int, int], ...] = ()
    room: float = 0.0
    low: int = 0
    backlog: tuple[int, int, int] = (0, 0, 0)

    def fits(self, ask: Ask) -> bool:
        """Whether a job would start on free devices."""
        usable = self.free if ask.unit == 1 else sum(n * (free // ask.unit * ask.unit) for free, n in self.gangs)
        return usable >= ask.ranks


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that may move: it has no promise where it is.

    Attributes:
        home: the member that has it, as a path from the level that is told: ``region/cluster``.
        waits_s: how long it has waited for devices, or had too few of them.
        width: devices that it has now; none while it waits.
    """

    ask: Ask
    home: str
    waits_s: float
    width: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """A member at a time (s)."""

    name: str
    at: float
    pools: tuple[PoolSummary, ...]
    candidates: tuple[Candidate, ...] = ()

    def pool(self, key: str) -> PoolSummary | None:
        """One of its pools."""
        return next((pool for pool in self.pools if pool.key == key), None)


def summarise(book: Book, name: str, now: float) -> Summary:
    """What a cluster tells of itself."""
    backlog: dict[str, list[int]] = {}
    movable: list[Candidate] = []
    for job in book.jobs.values():
        if job.state is State.WAITING:
            for key in [job.pool.key] if job.pool is not None else job.ask.pools[:1]:
                backlog.setdefault(key, [0, 0, 0])[min(job.ask.tier, 2)] += job.ranks
        if _movable(job):
            since = job.waits_since if job.state is State.WAITING else job.changed
            movable.append(Candidate(job.ask, name, now - since, job.width))
    named = nsmallest(CANDIDATES, movable, key=_longest)
    pools = tuple(_pool(book, book.pools[key], backlog.get(key, [0, 0, 0])) for key in sorted(book.pools))
    return Summary(name, now, pools, tuple(named))


def ripe(book: Book, now: float, waits_s: float, narrow_s: float) -> bool:
    """Whether a cluster has a job that may move and has waited, or been too narrow, for so long (s)."""
    if not book.waiting.count and not any(narrow and narrow[-1][0] >= LENT for narrow in book.narrow.values()):
        return False
    return any(
        now - (job.waits_since if job.state is State.WAITING else job.changed)
        >= (waits_s if job.state is State.WAITING else narrow_s)
        for job in book.jobs.values()
        if _movable(job)
    )


def merge(name: str, members: Iterable[Summary], now: float) -> Summary:
    """What a level tells of itself to the one above: the sums of its members, and their jobs that wait longest."""
    pools: dict[str, PoolSummary] = {}
    candidates: list[Candidate] = []
    for member in sorted(members, key=lambda member: member.name):
        candidates += [replace(one, home=f"{name}/{one.home}") for one in member.candidates]
        for pool in member.pools:
            known = pools.get(pool.key)
            pools[pool.key] = pool if known is None else _added(known, pool)
    named = nsmallest(CANDIDATES, candidates, key=_longest)
    return Summary(name, now, tuple(pools[key] for key in sorted(pools)), tuple(named))


def _movable(job: Job) -> bool:
    """Without a promise: it waits, and no devices are being freed for it; or it runs on fewer than it asks for."""
    if job.rank < LENT or job.claim:
        return False
    return job.state is State.WAITING or (job.state is State.RUNNING and job.width < job.ranks)


def _longest(candidate: Candidate) -> tuple[int, float, str]:
    return (1 if candidate.width else 0, -candidate.waits_s, candidate.ask.id)


def _pool(book: Book, pool: Pool, backlog: list[int]) -> PoolSummary:
    gangs = tuple((free, count) for free, count in enumerate(pool.by_free.counts) if free and count)
    room = max(0.0, book.settings.cap * pool.capacity - pool.promised)
    return PoolSummary(
        pool.key, pool.devices, pool.free, gangs, room, pool.low, (backlog[0], backlog[1], backlog[2])
    )  # fmt: skip


def _added(one: PoolSummary, other: PoolSummary) -> PoolSummary:
    gangs = dict(one.gangs)
    for free, count in other.gangs:
        gangs[free] = gangs.get(free, 0) + count
    return PoolSummary(
        one.key,
        one.devices + other.devices,
        max(one.free, other.free),  # a job runs in one cluster: what counts is the best of them
        tuple(sorted(gangs.items())),
        max(one.room, other.room),
        one.low + other.low,
        (one.backlog[0] + other.backlog[0], one.backlog[1] + other.backlog[1], one.backlog[2] + other.backlog[2]),
    )
