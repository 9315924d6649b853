"""A book as plain values: what a snapshot holds. A book made from its record plans as the one it was made of."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import inf

from scheduling.core import capacity
from scheduling.core.book import Book, arrival
from scheduling.core.devices import CLAIM, NEVER_YET
from scheduling.core.model import Ask, Job, Node, State, promise_of, rank_of
from scheduling.core.settings import LENT, STANDARD, Settings
from scheduling.core.waiting import UNTRIED

Counts = tuple[tuple[str, int], ...]
"""Devices by node, in the order of names."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node. `owed`: devices that are being freed here, by job, in the order in which they are handed on."""

    name: str
    pool: str
    rack: str
    size: int
    until: float | None = None
    closed: bool = False
    draining: bool = False
    owed: Counts = ()


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job; the fields are those of `model.Job`. `queued`: it is to be tried, where it waits."""

    ask: Ask
    state: State = State.WAITING
    pool: str = ""
    given: Counts = ()
    target: Counts | None = None
    claim: Counts = ()
    claimed_at: float = 0.0
    claim_until: float = 0.0
    reserves: bool = False
    admitted: float | None = None
    promised_in: str = ""
    window_start: float = 0.0
    window_end: float = 0.0
    delivered: float = 0.0
    served: float = 0.0
    rate: int = 0
    at: float = 0.0
    changed: float = 0.0
    changes: int = 0
    due: float = inf
    key: float = inf
    stamp: int = 0
    spares_at: float = inf
    not_before: float = 0.0
    waits_since: float = 0.0
    holding: bool = False
    hours: int = 0
    below: int = 0
    why: tuple[object, ...] = ()
    queued: bool = False
    failed_at: int = UNTRIED


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """A tenant; what is promised to it and how many devices it has follow from its jobs."""

    name: str
    quota: float | None = None
    weight: float = 1.0
    usage: float = 0.0
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class BookRecord:
    """All of a book. `gains` by pool; the other fields are those of `Book`."""

    nodes: tuple[NodeRecord, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    tenants: tuple[TenantRecord, ...] = ()
    gains: Counts = ()
    may_admit: bool = True
    planned_at: float = NEVER_YET
    grown_at: float = NEVER_YET
    turned_at: float = NEVER_YET
    settings: Settings = field(default_factory=Settings)


_OTHER = frozenset(("ask", "pool", "given", "target", "claim", "queued", "failed_at"))
_SAME = tuple(field.name for field in fields(JobRecord) if field.name not in _OTHER)
"""What a record has as the job has it."""


def record(book: Book) -> BookRecord:
    """The record of a book. Equal books have equal records, whatever happened in which order."""
    failed = {job.id: gain for job, gain in book.waiting.failed(book.pools)}
    return BookRecord(
        nodes=tuple(
            NodeRecord(
                node.name,
                node.pool.key,
                node.rack.name,
                node.size,
                node.until,
                node.closed,
                node.name in book.draining,
                tuple((job.id, count) for job, count in node.owed.items()),
            )
            for node in sorted(book.nodes.values(), key=lambda node: node.name)
        ),
        jobs=tuple(
            JobRecord(
                job.ask,
                pool=job.pool.key if job.pool else "",
                given=_counts(job.given),
                target=None if job.target is None else _counts(job.target),
                claim=_counts(job.claim),
                queued=job.ticket > 0,
                failed_at=failed.get(job.id, UNTRIED),
                **{name: getattr(job, name) for name in _SAME},
            )
            for job in sorted(book.jobs.values(), key=lambda job: job.id)
        ),
        tenants=tuple(
            TenantRecord(tenant.name, tenant.quota, tenant.weight, tenant.usage, tenant.at)
            for tenant in sorted(book.tenants.values(), key=lambda tenant: tenant.name)
        ),
        gains=tuple((key, book.pools[key].gain) for key in sorted(book.pools)),
        may_admit=book.may_admit,
        planned_at=book.planned_at,
        grown_at=book.grown_at,
        turned_at=book.turned_at,
        settings=book.settings,
    )


def restore(record: BookRecord) -> Book:
    """A book that plans as the one that `record` was made of."""
    book = Book(record.settings)
    book.planned_at, book.grown_at, book.turned_at = record.planned_at, record.grown_at, record.turned_at
    for key, _ in record.gains:
        book.pool(key)
    for node in record.nodes:
        made = book.add_node(node.name, node.pool, node.rack, node.size, 0.0, inf)
        capacity.close(made, True)  # in no index until all of it is known
    for tenant in record.tenants:
        known = book.tenant(tenant.name)
        known.quota, known.weight, known.usage, known.at = tenant.quota, tenant.weight, tenant.usage, tenant.at
    for job in record.jobs:
        _restore_job(book, job)
    for node in record.nodes:
        made = book.nodes[node.name]
        made.until = node.until
        if not node.draining:
            book.expect_end(made, record.planned_at)
        for name, count in node.owed:
            job = book.jobs[name]
            made.owed[job] = count
            made.held -= count
            made.free += count
            job.missing += count
        capacity.close(made, node.closed)
        if node.draining:
            book.draining.add(node.name)
    for job in book.jobs.values():
        if job.claim and not job.missing:
            book.whole.add(job)
    for key, gain in record.gains:
        book.pools[key].gain = gain
    for job in record.jobs:
        if job.failed_at != UNTRIED:
            book.waiting.fail(book.jobs[job.ask.id], job.failed_at)
    book.may_admit = record.may_admit
    return book


def _restore_job(book: Book, record: JobRecord) -> None:
    job = book.jobs[record.ask.id] = Job(record.ask, book.tenant(record.ask.tenant))
    for name in _SAME:
        setattr(job, name, getattr(record, name))
    job.pool = book.pools.get(record.pool)
    job.rank = rank_of(job.ask, job.admitted is not None)
    soft = job.state is not State.STOPPING
    for name, count in record.given:
        node = book.nodes[name]
        job.given[node] = node.jobs[job] = count
        node.free -= count
        node.low += count if soft and job.rank >= LENT else 0
        node.mid += count if soft and job.rank == STANDARD else 0
    if record.target is not None:
        job.target = {book.nodes[name]: count for name, count in record.target}
    for name, count in record.claim:
        node = book.nodes[name]
        job.claim[node] = count
        node.free -= count
        node.held += count
    stopped = job.state in (State.STOPPING, State.WAITING, State.HELD)
    job.width = 0 if stopped else sum((job.target or job.given).values())
    promise = promise_of(job.ask) if job.admitted is not None else 0
    tenant = job.tenant
    while tenant is not None:
        tenant.rate += job.rate
        tenant.hundredths += promise
        tenant = tenant.parent
    if job.admitted is not None:
        pool = book.pools[job.promised_in]
        capacity.promise(pool, job.ask, +1)
        pool.short += job.ranks - job.width if job.state is not State.HELD else 0
    elif job.guaranteed:
        book.arrived.add(arrival(job))
    if job.state is State.WAITING:
        (book.waiting.add if record.queued else book.waiting.park)(job)
    if job.state is State.RUNNING:
        book.enlist(job)
    if job.claim:
        book.claims[job.id] = job
        if job.reserves:
            next(iter(job.claim)).pool.reserver = job
        book.timer(job.claim_until, CLAIM, job.id)
    book.call(job, job.due)
    book.remind(job)


def _counts(places: dict[Node, int]) -> Counts:
    return tuple(sorted((node.name, count) for node, count in places.items()))
