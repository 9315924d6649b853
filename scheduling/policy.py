"""What the live scheduler decides: a pure function of a state and a time.

What was told and is not answered comes first, then lost nodes; then `scheduling.core`, the same policy as in the
simulator, decides on a book that is made of the state; then come moves that persons ask for. Its counts of devices by
node become devices here, and its codes sentences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from model.control import TELL_AGAIN, Directive, JobNotice
from model.ids import DeviceId, JobId
from scheduling import reasons, wishes
from scheduling.bridge import Bridge, gang_of
from scheduling.constants import (
    ASKS_AT_ONCE,
    DRAIN_S,
    IDLE_S,
    POLICY,
    STOPS_AT_ONCE,
    TELL_AGAIN_MOST_S,
    TELL_AGAIN_S,
    WAIT_GAP_S,
    WAITS_AT_ONCE,
    WAITS_PER_S,
)
from scheduling.core.actions import Action
from scheduling.core.model import Job, State
from scheduling.core.planner import Planner
from scheduling.core.reasons import decision
from scheduling.core.settings import LENT, LEVELS, STANDARD
from scheduling.state import ClusterState, Decision, JobState, Plan, Told

OWN = "own-"
"""Begins the request of a move that no person has asked for: its job says so while it is under way."""

SOON = timedelta(milliseconds=100)
"""When to look again where a plan has left something to the next one."""


def decide(state: ClusterState, now: datetime) -> Plan:
    """What is to be done at `now` (UTC). Equal states and times give equal plans."""
    return _Round(state, now).plan()


@dataclass(frozen=True, slots=True)
class _Size:
    """What a fleet has for a job: devices in all, and on the node that has the most."""

    fits: bool
    total: int
    most: int


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What a waiting job of a rank finds where it may run; the fields are those of `reasons.blocked`."""

    free: int
    together: int
    lower: int
    promised: int
    kept: int
    cordoned: int
    stopping: list[JobNotice]
    starting: list[JobNotice]


class _Round:
    """One plan in the making."""

    def __init__(self, state: ClusterState, now: datetime) -> None:
        self.state = state
        self.now = now
        self.decisions: dict[JobId, Decision] = {}
        self.waiting: dict[JobId, str] = {}
        self.looks: list[datetime] = []  # times at which the plan may change by itself
        # What follows from a kind of jobs is looked up once for all of them.
        self.sizes: dict[tuple[object, ...], _Size] = {}
        self.around: dict[tuple[object, ...], _Surroundings] = {}
        self.texts: dict[tuple[object, ...], str] = {}
        self.hit: list[JobId] = []  # jobs that are told now that they have lost devices with nodes
        self._ask()
        self._tell_again()
        self.settling = state.settle_until is not None and state.settle_until > now
        if not self.settling:
            self._lost()
        self.bridge = Bridge(state, now, self.hit)

    def plan(self) -> Plan:
        book, state = self.bridge.book, self.state
        if state.settle_until is not None and self.settling:
            self.looks.append(state.settle_until)
            for job in state.jobs:
                if self.bridge.state_of(job) is State.WAITING:
                    self.waiting[job.notice.job] = reasons.settling()
        else:
            asked = frozenset(job.notice.job for job in state.jobs if wishes.unanswered(job))
            made = Planner(book).plan(self.bridge.time, asked)
            self._obey(made.actions)
            places = sum(action.kind == "place" for action in made.actions)
            if places >= book.settings.places_at_once:
                # Where some were not served yet, nobody knows what is left for moves.
                self.looks.append(self.now + SOON)
            else:
                self._wishes()
            if made.wake is not None:
                self.looks.append(self.now + timedelta(seconds=max(made.wake - self.bridge.time, 0.05)))
            for job in state.jobs:
                known = book.jobs.get(job.notice.job)
                if known is not None and known.state is State.WAITING and (reason := self._waits(job, known)):
                    self.waiting[job.notice.job] = reason
        self._tell_waiting()
        self._tell_admitted()
        if sum(item.stops for item in self.decisions.values()) > STOPS_AT_ONCE:
            self.looks.append(self.now + SOON)
        self.looks += [item.since + timedelta(seconds=DRAIN_S) for item in state.draining]
        later = [(time - self.now).total_seconds() for time in self.looks if time > self.now]
        return Plan(
            tuple(self.decisions.values()),
            tuple(self.waiting.items()),
            round(min([*later, IDLE_S]) + 0.01, 3),
            self.bridge.accounts(),
            self.bridge.tenants(),
            book.grown_at,
            book.turned_at,
        )

    # -- what was told --------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        for job in self.state.ask[:ASKS_AT_ONCE]:
            self._decide(job, self._directive("wait", reasons.ask(), request=TELL_AGAIN))
        if len(self.state.ask) > ASKS_AT_ONCE:
            self.looks.append(self.now + SOON)

    def _tell_again(self) -> None:
        told_again = 0
        for job in self.state.jobs:
            if job.told is None or job.notice.job in self.decisions:
                continue
            due = job.told.last_at + timedelta(seconds=_patience(job.told))
            if due <= self.now and told_again == ASKS_AT_ONCE:
                due = self.now + SOON
            elif due <= self.now:
                told_again += 1
                told = job.told
                self._decide(job.notice.job, told.directive, told.devices, told.beneficiary, again=True)
                due = self.now + timedelta(seconds=_patience(told) * 2)
            self.looks.append(due)

    def _tell_admitted(self) -> None:
        for job in self.state.jobs:
            known = self.bridge.book.jobs.get(job.notice.job)
            new = known is not None and known.admitted is not None and known.admitted != job.promised
            if new and job.notice.job not in self.decisions:
                self._decide(job.notice.job, self._directive("admit", reasons.admitted(job.notice)))

    def _tell_waiting(self) -> None:
        told = 0
        gap = timedelta(seconds=max(WAIT_GAP_S, len(self.waiting) / WAITS_PER_S))
        for job in self.state.jobs:
            name = job.notice.job
            if name not in self.waiting or name in self.decisions:
                continue
            reason = _sentence(self.waiting[name])
            if reason == job.waiting:
                continue
            due = job.waiting_at + gap if job.waiting_at and job.waiting else self.now
            if due > self.now or told == WAITS_AT_ONCE:
                self.looks.append(max(due, self.now + timedelta(seconds=WAIT_GAP_S)))
                continue
            told += 1
            self._decide(name, self._directive("wait", reason))

    # -- lost nodes -----------------------------------------------------------------------------------------------

    def _lost(self) -> None:
        dead = {item.node for item in self.state.nodes if not item.alive}
        for job in self.state.jobs if dead else ():
            lost = {device.node for device in job.held_devices if device.node in dead}
            if job.told and job.told.directive.action == "lost":
                lost -= set(job.told.directive.nodes)
            if lost:
                self.hit.append(job.notice.job)
                nodes = tuple(sorted(lost))
                # What it may have taken up by now stays kept: only its next notice tells.
                devices = job.told.devices if job.told else ()
                directive = self._directive("lost", reasons.lost(job.notice, nodes), nodes=nodes)
                self._decide(job.notice.job, directive, devices)

    # -- what the core has decided --------------------------------------------------------------------------------

    def _obey(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            notice = self._notice(action.job)
            if action.kind == "place":
                devices = self.bridge.take(action.places)
                self._decide(
                    notice.job,
                    self._directive(
                        "place",
                        self._says(action),
                        devices=devices,
                        device_of_rank=gang_of(notice.demand, len(devices)).device_of_rank,
                        request=notice.request,
                    ),
                    devices,
                )
            elif action.kind in ("resize", "move"):
                self._change(action)
            elif action.kind == "preempt":
                self._preempt(action)

    def _preempt(self, action: Action) -> None:
        beneficiary = JobId(action.beneficiary.id) if action.beneficiary is not None else None
        self._decide(JobId(action.job.id), self._directive("preempt", self._says(action)), beneficiary=beneficiary)

    def _change(self, action: Action) -> None:
        """Another width or another place for a running job; one that could not be changed just now stops instead."""
        notice, beneficiary = self._notice(action.job), action.beneficiary
        devices = self.bridge.after(notice, action.places)
        if self.bridge.jobs[notice.job].stuck and action.why[0] in ("drains", "gives way"):
            return self._preempt(replace(action, kind="preempt", places={}))
        directive = self._directive(
            "resize" if len(devices) != len(notice.devices) else "migrate",
            self._says(action),
            devices=devices,
            device_of_rank=gang_of(notice.demand, len(devices)).device_of_rank,
            request=f"{OWN}{self.state.tick}",
        )
        return self._decide(notice.job, directive, devices, JobId(beneficiary.id) if beneficiary is not None else None)

    # -- why it waits ---------------------------------------------------------------------------------------------

    def _waits(self, job: JobState, known: Job) -> str:
        """What a job waits for; empty where it was not its turn in this plan."""
        demand = job.notice.demand
        if not self.bridge.alive:
            return reasons.no_nodes()
        size = self._size(known)
        if not size.fits:
            return reasons.never(demand, known.ranks, size.total, size.most)
        if known.claim:
            return reasons.claimed(known.ranks, known.ranks - known.missing, *self._givers(known))
        about = self._surroundings(known)
        if known.not_before > self.bridge.time and about.free >= known.ranks:
            return reasons.cooling(known.not_before - self.bridge.time)
        tried = known
        if not known.why and known.not_before <= self.bridge.time:
            head = self.bridge.book.waiting.head_of(known)
            if head is None or not head.why:
                return ""
            tried = head
        key = (known.ask.pools, known.rank, known.ranks, known.unit, known.ask.tier, known.tenant.name)
        text = self.texts.get(key)
        if text is None:
            text = self.texts[key] = self._unpromised(tried) + reasons.blocked(
                known.ranks,
                about.free,
                about.together if about.together < known.unit else None,
                about.lower,
                about.promised if known.rank == LENT and known.ask.tier < STANDARD else 0,
                about.kept,
                about.cordoned,
                about.stopping,
                about.starting,
                ended=any(item.devices for item in self.state.draining),
            )
        return text

    def _unpromised(self, tried: Job) -> str:
        """Why a guaranteed job has no promise yet; empty where it has, or only a place is missing."""
        promise = tried.why[4:] if tried.why[:1] == ("blocked",) else ()
        if not promise:
            return ""
        code, name, *figures = promise
        level = LEVELS[tried.ask.tier]
        if code == "beside":
            return reasons.no_width(level, *(int(str(figure)) for figure in figures))
        promised, most = float(str(figures[0])), float(str(figures[2]))
        if code == "quota":
            return reasons.over_quota(level, str(name), promised, most)
        return reasons.over_cap(level, promised, most, float(str(figures[1])))

    def _surroundings(self, known: Job) -> _Surroundings:
        key = (known.ask.pools, known.rank)
        found = self.around.get(key)
        if found is None:
            pools = [self.bridge.book.pools[key] for key in known.ask.pools]
            there = [job for job in self.bridge.book.jobs.values() if job.pool in pools]
            lower = max(pool.low if known.rank <= LENT else 0 for pool in pools)
            lower += max(pool.mid if known.rank < STANDARD else 0 for pool in pools)
            if known.rank == LENT:  # its like give it nothing
                lower = max(lower - sum(job.width for job in there if job.rank == LENT), 0)
            found = self.around[key] = _Surroundings(
                max(pool.free for pool in pools),
                max((node.free for pool in pools for node in pool.nodes.values() if not node.closed), default=0),
                lower,
                max(pool.mid for pool in pools),
                max(sum(node.held for node in pool.nodes.values()) for pool in pools),
                sum(
                    len(room.open)
                    for room in self.bridge.rooms.values()
                    if room.pool in known.ask.pools and room.node.name in self.bridge.cordoned
                ),
                self._notices(there, State.STOPPING),
                self._notices([job for job in there if job.rank > known.rank], State.CHANGING),
            )
        return found

    def _notices(self, jobs: list[Job], state: State) -> list[JobNotice]:
        names = [JobId(job.id) for job in jobs if job.state is state and job.id in self.bridge.jobs]
        return [self.bridge.jobs[name].notice for name in names]

    def _size(self, known: Job) -> _Size:
        key = (known.ask.pools, known.ranks, known.unit)
        found = self.sizes.get(key)
        if found is None:
            by_pool: dict[str, list[int]] = {pool: [] for pool in known.ask.pools}
            for room in self.bridge.rooms.values():
                if room.pool in by_pool:
                    by_pool[room.pool].append(len(room.devices))
            fits = any(
                sum(size // known.unit * known.unit for size in sizes) >= known.ranks for sizes in by_pool.values()
            )
            total = max((sum(sizes) for sizes in by_pool.values()), default=0)
            found = self.sizes[key] = _Size(
                fits, total, max((max(sizes, default=0) for sizes in by_pool.values()), default=0)
            )
        return found

    def _givers(self, job: Job) -> tuple[list[JobNotice], list[JobNotice]]:
        """Jobs that are giving up all devices, or some, that this one is owed."""
        found = dict.fromkeys(other for node in job.claim if node.owed.get(job) for other in node.jobs)
        givers = sorted(found, key=lambda other: other.id)
        shrinking = [other for other in givers if other.target is not None]
        return self._notices(givers, State.STOPPING), self._notices(shrinking, State.CHANGING)

    # -- persons' wishes ------------------------------------------------------------------------------------------

    def _wishes(self) -> None:
        """Answers who wants to be moved or resized."""
        wanted = [job for job in self.state.jobs if wishes.unanswered(job) and job.notice.job not in self.decisions]
        for job in sorted(wanted, key=lambda job: (job.notice.demand.submitted_at, job.notice.job)):
            notice = job.notice
            if notice.request.startswith(OWN):
                continue
            found = wishes.answer(self.bridge, notice)
            placed = gang_of(notice.demand, len(found.devices)).device_of_rank if found.devices else ()
            directive = self._directive(
                found.action, found.reason, devices=found.devices, device_of_rank=placed, request=notice.request
            )
            self._decide(notice.job, directive, found.devices)

    # -- helpers --------------------------------------------------------------------------------------------------

    def _says(self, action: Action) -> str:
        """Why the policy has decided so."""
        return decision(action, lambda room: self.bridge.rooms[room].node.name)

    def _notice(self, job: Job) -> JobNotice:
        return self.bridge.jobs[JobId(job.id)].notice

    def _decide(
        self,
        job: JobId,
        directive: Directive,
        devices: tuple[DeviceId, ...] = (),
        beneficiary: JobId | None = None,
        again: bool = False,
    ) -> None:
        self.decisions[job] = Decision(job, directive, devices, beneficiary, again)

    def _directive(self, action: str, reason: str, **fields: object) -> Directive:
        return Directive(decision="", action=action, reason=_sentence(reason), policy=POLICY, state_digest="", **fields)  # type: ignore[arg-type]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def _patience(told: Told) -> float:
    return min(TELL_AGAIN_S * 2 ** (told.times - 1), TELL_AGAIN_MOST_S) if told.times else 0.0
