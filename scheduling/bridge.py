"""A state as the policy sees it, and back: nodes as numbers of devices, jobs as what was promised and delivered.

The ledger says who holds which device; the accounts of jobs say what the policy made of them in the plan before. A book
is made of both for every plan, and is told what has become of the jobs since. So the ledger decides what is free, and a
word that is late, lost or told twice can make the policy late, and never make it give a device twice.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf

import orjson

from model.control import Demand, JobNotice
from model.ids import DeviceId, JobId, NodeId
from model.job_state import JobPhase
from model.manifest import NumericsClass
from scheduling.accounts import CORE_TIER, COUNTED, NOWHERE, SAME, follow, heard, seconds, until
from scheduling.constants import LIVE
from scheduling.core.book import Book
from scheduling.core.model import Ask, Job, Node, State
from scheduling.core.record import BookRecord, JobRecord, NodeRecord, TenantRecord, restore
from scheduling.core.settings import BASIC
from scheduling.fitting import Gang
from scheduling.state import Account, ClusterState, Counts, JobState, NodeState, TenantState, above

_STARTS = (JobPhase.STARTING, JobPhase.MOVING, JobPhase.RESIZING)
_ENDED = "of ended jobs"
"""Pays for devices that ended jobs have left behind."""


@dataclass(frozen=True, slots=True)
class Room:
    """A node's devices of one accelerator model: what the policy calls a node.

    Attributes:
        pool: names the numerics class and the model.
        open: devices that nobody holds or may hold, in the node's order.
    """

    name: str
    node: NodeId
    pool: str
    devices: tuple[DeviceId, ...]
    open: list[DeviceId]


def gang_of(demand: Demand, width: int = 0) -> Gang:
    """What a job needs at once, at a width; 0 for the one that it asks for."""
    return Gang(demand.ranks, width or demand.max_width, demand.ranks_per_group)


def widths_of(demand: Demand, unit: int, widest: int, *, placed: bool) -> tuple[int, ...]:
    """At which widths up to `widest` a job can run: only that before anybody knows how much memory its ranks need,
    unless it runs and can find out.
    """
    known = demand.widths if placed or demand.measured else ()
    return tuple(sorted({*(width for width in known if width % unit == 0 and width < widest), widest}))


def class_key(numerics: NumericsClass) -> bytes:
    """Sorts and compares numerics classes."""
    return orjson.dumps(numerics.model_dump(), option=orjson.OPT_SORT_KEYS)


class Bridge:
    """The book of a state at a time, and what its counts mean.

    Attributes:
        rooms: of live nodes, by name.
        alive: live nodes, by name.
        closed: live nodes on which nothing is placed: cordoned by a person, or with parts of jobs that nobody knows.
        book: what the planner decides on.
    """

    def __init__(self, state: ClusterState, now: datetime, lost: Iterable[JobId] = ()) -> None:
        """`lost`: jobs that are told now that nodes of theirs are lost."""
        self.state = state
        self.time = seconds(now)
        self.alive = {item.node.name: item for item in state.nodes if item.alive}
        self.jobs = {job.notice.job: job for job in state.jobs}
        self._lost = frozenset(lost)
        self._tenants = {tenant.name: tenant for tenant in state.tenants}
        self.rooms: dict[str, Room] = {}
        self.room_of: dict[DeviceId, str] = {}
        self._owner: dict[DeviceId, JobId] = {}
        self._given: dict[JobId, dict[str, int]] = {}  # devices by room that a job holds or may have taken up
        self._states: dict[JobId, State] = {}
        self._accounts: dict[JobId, Account] = {}  # as they stand after what jobs have said
        self._kinds: dict[str, tuple[bytes, str]] = {}  # of pools: numerics class and model
        self._pools: dict[tuple[bytes | None, str | None], tuple[str, ...]] = {}
        self._hash: dict[bytes, str] = {}
        for name in sorted(self.alive):
            self._add_rooms(self.alive[name])
        for job in state.jobs:
            name = job.notice.job
            # What two jobs say that they hold is the first's.
            held = [device for device in job.held_devices if self._owner.setdefault(device, name) == name]
            self._given[name] = self._count(held) if held else {}
            self._states[name] = self._state(job)
        left = {device for item in state.draining for device in item.devices}
        for room in self.rooms.values():
            room.open.extend(item for item in room.devices if item not in self._owner and item not in left)
        known = {*self.jobs, *(item.job for item in state.ended), *(item.job for item in state.draining)}
        self.cordoned = dict(state.cordoned)
        self.closed = {
            item.node
            for item in self.alive.values()
            if item.node.name in self.cordoned or any(job not in known for job, _ in item.jobs)
        }
        self.book: Book = restore(self._record())
        self._tell()

    # -- what the counts mean -------------------------------------------------------------------------------------

    def take(self, places: dict[Node, int]) -> tuple[DeviceId, ...]:
        """Devices for the counts of a place: of each node the first that are open, in the order of nodes."""
        chosen: list[DeviceId] = []
        for node in sorted(places, key=lambda node: node.order):
            room = self.rooms[node.name]
            taken, room.open[:] = room.open[: places[node]], room.open[places[node] :]
            if len(taken) < places[node]:  # the book is made of these very lists
                raise AssertionError(f"{node.name} has {len(taken)} open devices, not {places[node]}.")
            chosen += taken
        return tuple(chosen)

    def after(self, notice: JobNotice, places: dict[Node, int]) -> tuple[DeviceId, ...]:
        """All devices of a running job at other counts: of each node those that it has, then open ones."""
        chosen: list[DeviceId] = []
        for node in sorted(places, key=lambda node: node.order):
            mine = [device for device in notice.devices if self.room_of.get(device) == node.name]
            chosen += mine[: places[node]]
            if len(mine) < places[node]:
                chosen += self.take({node: places[node] - len(mine)})
        return tuple(chosen)

    def pools(self, demand: Demand) -> tuple[str, ...]:
        """Where a job may run: nodes of its numerics class, once it has one, and of the accelerator it asks for."""
        key = None if demand.numerics is None else class_key(demand.numerics)
        wanted = None if demand.accelerator is None else demand.accelerator.casefold()
        found = self._pools.get((key, wanted))
        if found is None:
            found = self._pools[key, wanted] = tuple(
                pool
                for pool, (its_key, model) in sorted(self._kinds.items())
                if (key is None or its_key == key) and (wanted is None or model == wanted)
            )
        return found

    def state_of(self, job: JobState) -> State:
        """Where the ledger says that a job stands with its devices."""
        return self._states[job.notice.job]

    def _state(self, job: JobState) -> State:
        notice, told = job.notice, job.told
        if notice.devices or (told is not None and told.devices):
            action = told.directive.action if told is not None else ""
            if notice.held or action in ("preempt", "lost") or notice.job in self._lost:
                return State.STOPPING
            if action in ("place", "migrate", "resize") or notice.phase in _STARTS:
                return State.CHANGING
            whole = sum(self._given[notice.job].values()) == len(notice.devices)
            return State.RUNNING if notice.phase is JobPhase.RUNNING and whole else State.STOPPING
        return State.WAITING if notice.wants == "devices" and not notice.held else State.HELD

    def account(self, job: Job) -> Account:
        """What is to be remembered of a job: what was delivered up to what it has said last, or up to its admission."""
        before = self._accounts[JobId(job.id)]
        values = {name: getattr(job, name) for name in SAME}
        if job.admitted == before.admitted:
            values.update((name, getattr(before, name)) for name in COUNTED)
        return Account(
            state=int(job.state),
            claim=_counts((node.name, count) for node, count in job.claim.items()) if job.claim else (),
            due=None if job.due >= 1e300 else job.due,
            key=None if job.key >= 1e300 else job.key,
            **values,
        )

    def accounts(self) -> tuple[tuple[JobId, Account], ...]:
        """Of all jobs."""
        return tuple((name, self.account(self.book.jobs[name])) for name in sorted(self.jobs) if name in self.book.jobs)

    def tenants(self) -> tuple[TenantState, ...]:
        """All that are known."""
        found: dict[str, TenantState] = {}
        for path, item in self.book.tenants.items():
            under, _, name = path.rpartition("/")
            if path != _ENDED:
                found[name] = TenantState(
                    name, under.rpartition("/")[2], item.quota, item.weight, item.usage, item.at
                )  # fmt: skip
        return tuple(found[name] for name in sorted(found))

    def _path(self, tenant: str) -> str:
        """A tenant as the core names it: ``org/team``."""
        return "/".join(reversed(above(tenant, self._tenants)))

    # -- the book as it was, with the devices as they are ---------------------------------------------------------

    def _add_rooms(self, item: NodeState) -> None:
        by_model: dict[str, list[DeviceId]] = {}
        for device, model in item.devices:
            by_model.setdefault(model.casefold(), []).append(device)
        key = class_key(item.numerics)
        digest = self._hash.get(key)
        if digest is None:
            digest = self._hash[key] = hashlib.sha256(key).hexdigest()[:12]
        for model in sorted(by_model):
            name = str(item.node) if len(by_model) == 1 else f"{item.node} {model}"
            pool = f"{model}/{digest}"
            self._kinds[pool] = key, model
            self.rooms[name] = Room(name, item.node, pool, tuple(by_model[model]), [])
            self.room_of.update((device, name) for device in by_model[model])

    def _count(self, devices: Iterable[DeviceId]) -> dict[str, int]:
        return dict(Counter(self.room_of[device] for device in devices if device in self.room_of))

    def _record(self) -> BookRecord:
        jobs = [made for job in self.state.jobs if (made := self._job_record(job)) is not None]
        ended = [
            JobRecord(
                Ask(f"{_ENDED} {index}", sum(given.values()), BASIC, NOWHERE, self.time, tenant=_ENDED),
                State.STOPPING,
                given=_counts(given.items()),
                at=self.time,
            )
            for index, item in enumerate(self.state.draining)
            if (given := self._count(device for device in item.devices if device not in self._owner))
        ]
        jobs, owed = self._claims(jobs, ended)
        return BookRecord(
            nodes=tuple(
                NodeRecord(
                    room.name,
                    room.pool,
                    "",
                    len(room.devices),
                    closed=room.node in self.closed,
                    draining=self.cordoned.get(room.node.name, False),
                    owed=tuple(owed.get(room.name, ())),
                )
                for room in self.rooms.values()
            ),
            jobs=(*jobs, *ended),
            tenants=tuple(
                TenantRecord(self._path(item.name), item.quota, item.weight, item.usage, item.at)
                for item in self.state.tenants
            ),
            gains=tuple((key, 0) for key in sorted({*self._kinds, *(job.promised_in for job in jobs)}) if key),
            planned_at=self.time,
            grown_at=self.state.grown_at,
            turned_at=self.state.turned_at,
            settings=LIVE,
        )

    def _job_record(self, job: JobState) -> JobRecord | None:
        """A job in the state from which what has happened since can be told to the book."""
        demand, account, now = job.notice.demand, job.account, self.time
        state, given = self.state_of(job), self._given[job.notice.job]
        if account is None and state is State.HELD:
            return None  # it comes after other jobs, and has asked for nothing yet
        told = job.told.directive if job.told is not None else None
        # A person's wish for more than it asked for so far is granted before the job asks for it.
        widest = max(demand.max_width, job.notice.width, len(job.notice.devices), len(told.devices) if told else 0)
        runs = gang_of(demand, widest).runs
        # A process tree that is spread unevenly stays on one node.
        unit = runs[0] if len(set(runs)) == 1 else widest
        ask = Ask(
            job.notice.job,
            widest,
            CORE_TIER[demand.tier],
            self.pools(demand) or NOWHERE,
            seconds(demand.submitted_at),
            widths=widths_of(demand, unit, widest, placed=bool(given)),
            unit=unit,
            tenant=self._path(demand.tenant),
            priority=demand.priority,
        )
        word = heard(job.notice, now)
        if account is None:
            account = Account(int(state), at=word.at, changed=now, waits_since=now)
        was = State(account.state)
        account = self._accounts[job.notice.job] = follow(account, demand.tier, demand.max_width, word)
        account = replace(until(account, demand.tier, demand.max_width, now), at=now)
        if account.promised_in and account.promised_in not in self._kinds and ask.pools != NOWHERE:
            account = replace(account, promised_in=ask.pools[0])  # the last node there is gone
        claim = account.claim if state in (State.WAITING, State.RUNNING) else ()
        moves = told is not None and told.action in ("migrate", "resize")
        return JobRecord(
            ask,
            state=_begins(was, state),
            pool=self.rooms[next(iter(given))].pool if given else account.promised_in,
            given=_counts(given.items()),
            target=_counts(self._count(told.devices).items()) if told is not None and moves else None,
            claim=claim,
            queued=not claim and account.not_before <= now,
            due=inf if account.due is None else account.due,
            key=inf if account.key is None else account.key,
            **{name: getattr(account, name) for name in SAME},
        )

    def _claims(
        self, jobs: list[JobRecord], ended: list[JobRecord]
    ) -> tuple[list[JobRecord], dict[str, list[tuple[str, int]]]]:
        """Claims that can still become complete, and what each room owes to whom. Others lapse."""
        claimed = [job for job in jobs if job.claim]
        if not claimed:
            return jobs, {}
        free = {room.name: len(room.open) if room.node not in self.closed else 0 for room in self.rooms.values()}
        coming: Counter[str] = Counter()
        for job in [*jobs, *ended]:
            if job.state is State.STOPPING:
                coming.update(dict(job.given))
            elif job.target is not None:  # it shrinks, or moves away
                coming.update(Counter(dict(job.given)) - Counter(dict(job.target)))
        owed: dict[str, list[tuple[str, int]]] = {}
        lapsed: set[str] = set()
        for job in sorted(claimed, key=lambda job: (job.reserves, job.claimed_at, job.ask.id)):
            parts = [(name, count, min(free.get(name, 0), count)) for name, count in job.claim]
            # Nobody need be on his way to make room for one that only keeps what becomes free by itself.
            gone = any(name not in free for name, _, _ in parts)
            if gone or (not job.reserves and any(count - here > coming[name] for name, count, here in parts)):
                lapsed.add(job.ask.id)
                continue
            for name, count, here in parts:
                free[name] -= here
                if here < count:
                    coming[name] -= count - here
                    owed.setdefault(name, []).append((job.ask.id, count - here))
        return [replace(job, claim=(), queued=True) if job.ask.id in lapsed else job for job in jobs], owed

    # -- what has happened since ----------------------------------------------------------------------------------

    def _tell(self) -> None:
        book, now = self.book, self.time
        for name, known in self.jobs.items():
            job = book.jobs.get(name)
            if job is None:
                continue
            state = self.state_of(known)
            if state in (State.WAITING, State.HELD) and job.state is State.STOPPING:
                book.stopped(job, now)
                if known.account is not None and known.account.state == State.CHANGING:
                    book.cool(job, now + LIVE.again_s)  # its start failed
                elif known.notice.phase is not JobPhase.SUSPENDED:
                    job.not_before = now  # it has lost its devices, to nobody who needs them
                    book.wait(job, now)
            if state is State.WAITING and job.state is State.HELD:
                book.hold(job, False, now)
            elif state is State.HELD and job.state is State.WAITING:
                book.hold(job, True, now)
            elif state is State.RUNNING and job.state is State.CHANGING:
                book.running(job, now)
            # What delivers is what runs, whatever it was told: it delivers until it stands.
            rate = self._accounts[name].rate
            if rate != job.rate and job.state is not State.HELD:
                book.rate(job, rate, now)


def _begins(was: State, state: State) -> State:
    """The state in which a job is put into the book, so that the way to `state` is one that the book knows."""
    match state:
        case State.WAITING | State.HELD:
            return was if was in (State.WAITING, State.HELD) else State.STOPPING
        case State.RUNNING:
            return State.CHANGING if was is State.CHANGING else State.RUNNING
        case _:
            return state


def _counts(items: Iterable[tuple[str, int]]) -> Counts:
    return tuple(sorted(items))
