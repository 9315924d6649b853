"""What a cluster's scheduler knows: nodes, jobs, what each job holds, and what it was told and has not answered yet.

A `ClusterState` is a value. `scheduling.ledger.apply` folds what came in, `scheduling.policy.decide` makes a plan of
it, `scheduling.ledger.commit` records the plan. As canonical JSON it is the scheduler's snapshot, named by its digest.
All collections are sorted tuples, so that equal states are equal bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, cast

import orjson

from model.codec import from_value, parse_json, to_json
from model.control import AddressedDirective, Directive, JobNotice
from model.errors import ModelError
from model.ids import DeviceId, Epoch, Generation, JobId, NodeId, TenantId
from model.job_spec import Tier
from model.manifest import NumericsClass
from model.shape import Shape

STATE_VERSION = 2
"""Version 1 held claims on devices and times of the simple policy before; what it says of devices and jobs is read."""


@dataclass(frozen=True, slots=True)
class PartState(Shape):
    """A part of a job on a node, as the node tells it.

    Attributes:
        device_ms: device time that it has delivered in this epoch, in milliseconds, as told at `at`; None where the
            node's observer does not say.
        base_ms, base_at: what was told first since the job runs as it does.
    """

    job: JobId
    epoch: Epoch
    device_ms: int | None
    at: datetime
    base_ms: int | None
    base_at: datetime


@dataclass(frozen=True, slots=True)
class Finding(Shape):
    """Something that a node says and the ledger does not, or the other way round; see `scheduling.reconcile`.

    Attributes:
        kind: ``stranger``, ``missing``, ``leftover``, ``delivered`` or ``silent``.
        job: empty where it is about a node alone.
        text: a sentence for people, without its first letter in capitals and its full stop.
        since: when it was first found.
        counts: it has held for long enough to be told.
        asked_at: when the job was asked about it.
    """

    kind: str
    job: str
    node: NodeId
    text: str
    since: datetime
    counts: bool = False
    asked_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class NodeState(Shape):
    """A node. One that is not alive is kept as long as a job holds devices there that it must be told to give up.

    Attributes:
        devices: with their accelerator models, in the node's order.
        jobs: (job, epoch) of what the node said it has.
        heard_at: when it was told of last.
        parts: of its jobs.
    """

    node: NodeId
    alive: bool
    devices: tuple[tuple[DeviceId, str], ...]
    numerics: NumericsClass
    jobs: tuple[tuple[JobId, Epoch], ...] = ()
    heard_at: datetime | None = None
    parts: tuple[PartState, ...] = ()


@dataclass(frozen=True, slots=True)
class Told(Shape):
    """A directive that a job has been told, until a notice shows what came of it.

    Attributes:
        devices: what nobody else may get in the meantime, beside what the job's notice lists.
        first_at: when it was decided.
        last_at: when it was told the last time.
        times: how often it was told; 0 where it is told with the next plan, see `constants.STOPS_AT_ONCE`.
        beneficiary: for ``preempt``: the job that gets the devices.
    """

    directive: Directive
    first_at: datetime
    last_at: datetime
    times: int = 1
    devices: tuple[DeviceId, ...] = ()
    beneficiary: JobId | None = None


Counts = tuple[tuple[str, int], ...]
"""Devices by room (a node's devices of one model, see `scheduling.bridge`), in the order of names."""


@dataclass(frozen=True, slots=True)
class Account(Shape):
    """What the policy remembers of a job; `scheduling.core.model.Job` says what each is. Times in seconds
    since 1970.

    Attributes:
        state: a `core.model.State`: what the plan before has made of it.
        admitted: None before its level is promised.
        due, key: None for never.
    """

    state: int
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
    due: float | None = None
    key: float | None = None
    not_before: float = 0.0
    waits_since: float = 0.0
    hours: int = 0
    below: int = 0


@dataclass(frozen=True, slots=True)
class TenantState(Shape):
    """A tenant.

    Attributes:
        under: the tenant above it; empty for none.
        quota: devices times level that may be promised to it and those below it; None for any.
        weight: its share beside other tenants of the basic tier.
        usage: device-seconds that count less the older they are, up to `at`; see `scheduling.core.service.spend`.
    """

    name: str
    under: str = ""
    quota: float | None = None
    weight: float = 1.0
    usage: float = 0.0
    at: float = 0.0


def above(name: str, tenants: Mapping[str, TenantState]) -> tuple[str, ...]:
    """A tenant and those above it, from below."""
    found = [name]
    while (known := tenants.get(found[-1])) is not None and known.under and known.under not in found:
        found.append(known.under)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class ServiceState(Shape):
    """What the jobs of a tenant and tier that have ended were given.

    Attributes:
        hours: job-hours in which a level was promised, counted from each job's admission; `below` of them missed it.
        served_s: device-seconds.
    """

    tenant: TenantId
    tier: Tier
    jobs: int = 0
    hours: int = 0
    below: int = 0
    served_s: float = 0.0

    def plus(self, other: ServiceState) -> ServiceState:
        """The sum."""
        return replace(
            self,
            jobs=self.jobs + other.jobs,
            hours=self.hours + other.hours,
            below=self.below + other.below,
            served_s=self.served_s + other.served_s,
        )


@dataclass(frozen=True, slots=True)
class JobState(Shape):
    """A job by its newest notice.

    Attributes:
        told: what it has not answered yet.
        account: what the policy remembers of it; None before the first plan with it.
        waiting: the reason for waiting that it was told last, and when.
        answered: the request to move or resize that was done last; its notice may still name it for a moment.
        promised: the time of its admission that it was told.
        stuck: it was told to move or to be resized, and has come to run on where it was.
    """

    notice: JobNotice
    told: Told | None = None
    account: Account | None = None
    waiting: str = ""
    waiting_at: datetime | None = None
    answered: str = ""
    promised: float | None = None
    stuck: bool = False

    @property
    def stamp(self) -> tuple[Generation, int]:
        """Which of two notices of one workflow is newer."""
        return self.notice.generation, self.notice.number

    @property
    def held_devices(self) -> tuple[DeviceId, ...]:
        """What nobody else may get: what it holds, and what it may have taken up by now."""
        told = self.told.devices if self.told else ()
        return tuple(dict.fromkeys((*self.notice.devices, *told)))


@dataclass(frozen=True, slots=True)
class Draining(Shape):
    """Devices of a job that ended without saying so: nobody gets them while a node may still have processes on them.

    Attributes:
        listed: nodes that said after the end that they have parts of it: when they say so no more, these are gone.
    """

    job: JobId
    epoch: Epoch
    devices: tuple[DeviceId, ...]
    since: datetime
    listed: tuple[NodeId, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended(Shape):
    """A job that has ended. It is remembered for a while, so that a late notice does not bring it back.

    A notice of a higher generation does: somebody has reset the workflow to a point before its end.
    """

    job: JobId
    workflow_run: str
    generation: Generation
    at: datetime


@dataclass(frozen=True, slots=True)
class ClusterState(Shape):
    """All that a plan depends on, apart from the time.

    Attributes:
        tick: how many inboxes were folded in.
        settle_until: nothing is given away before: the state was restored from an older snapshot, and jobs are asked
            to tell theirs again.
        ask: jobs that are to be asked with the next plan.
        cordoned: nodes, by name, on which nothing new is placed; with whether they are also emptied.
        service: of jobs that have ended, by tenant and tier.
        findings: what nodes and the ledger say differently.
        grown_at, turned_at: those of `scheduling.core.book.Book`.
    """

    cluster: str
    version: int = STATE_VERSION
    tick: int = 0
    nodes: tuple[NodeState, ...] = ()
    jobs: tuple[JobState, ...] = ()
    draining: tuple[Draining, ...] = ()
    ended: tuple[Ended, ...] = ()
    settle_until: datetime | None = None
    ask: tuple[JobId, ...] = ()
    cordoned: tuple[tuple[str, bool], ...] = ()
    tenants: tuple[TenantState, ...] = ()
    service: tuple[ServiceState, ...] = ()
    findings: tuple[Finding, ...] = ()
    grown_at: float = 0.0
    turned_at: float = 0.0

    def job(self, job: JobId) -> JobState | None:
        """A job by its id; a scan, for tests and people."""
        return next((state for state in self.jobs if state.notice.job == job), None)

    def to_json(self) -> bytes:
        """Canonical bytes: equal for equal states."""
        value = orjson.loads(to_json(replace(self, nodes=(), jobs=())))
        value["nodes"], value["jobs"] = _NODES.of(self.nodes), _JOBS.of(self.jobs)
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)

    @classmethod
    def from_json(cls, data: bytes) -> ClusterState:
        """Reads a snapshot of this version or of the one before.

        Raises:
            ModelError: ``model.json`` or ``model.invalid``, or ``state.version`` for a version that is not known.
        """
        value: object = parse_json(cls.__name__, data)
        fields: dict[str, Any] = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        version = fields.get("version")
        if version == 1:
            return from_value(cls, _of_version_1(fields))
        if isinstance(version, int) and version != STATE_VERSION:
            raise ModelError(
                f"The scheduler's snapshot is of version {version}; this build reads 1 and {STATE_VERSION}.",
                code="state.version",
            )
        return from_value(cls, cast(object, value))


class _Written:
    """The canonical bytes of the items of the last two states. Nearly all of them are in the next one again, and to
    write a whole state takes a third of a tick.
    """

    def __init__(self) -> None:
        self._last: list[dict[int, tuple[Shape, orjson.Fragment]]] = [{}, {}]

    def of(self, items: tuple[Shape, ...]) -> list[orjson.Fragment]:
        """Of each item. The very same one is not written again: it is kept, so that its id stays its own."""
        known = {**self._last[0], **self._last[1]}
        now: dict[int, tuple[Shape, orjson.Fragment]] = {}
        written: list[orjson.Fragment] = []
        for item in items:
            found = known.get(id(item))
            if found is None or found[0] is not item:
                # Sorted keys: the precision flags of a numerics class come in the order in which a node told them.
                data = orjson.dumps(orjson.loads(to_json(item)), option=orjson.OPT_SORT_KEYS)
                found = item, orjson.Fragment(data)
            now[id(item)] = found
            written.append(found[1])
        self._last = [self._last[1], now]
        return written


_NODES, _JOBS = _Written(), _Written()


def _of_version_1(value: dict[str, Any]) -> dict[str, Any]:
    jobs = [
        {key: item for key, item in job.items() if key not in ("claims", "waits_since", "changed_at")}
        for job in value.get("jobs", ())
    ]
    return {**value, "version": STATE_VERSION, "jobs": jobs}


def digest_of(data: bytes) -> str:
    """The name of a snapshot: sha256 of its canonical bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


# -- plans -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision(Shape):
    """One decision about one job, with its reason.

    Attributes:
        directive: without an id or a digest: `commit` gives it both.
        devices: what is kept from others until the job has answered.
        beneficiary: for ``preempt``: the job that gets the devices.
        again: it was told before, and is told once more as it was.
    """

    job: JobId
    directive: Directive
    devices: tuple[DeviceId, ...] = ()
    beneficiary: JobId | None = None
    again: bool = False

    @property
    def stops(self) -> bool:
        """Whether it is a new decision that ends the job's stay where it is."""
        return not self.again and self.directive.action in ("preempt", "lost")


_TALK = ("wait", "admit")
"""Actions that change nothing of where a job is."""


@dataclass(frozen=True, slots=True)
class Plan(Shape):
    """What is to be done now.

    Attributes:
        decisions: at most one for each job, in the order in which they were made.
        waiting: (job, reason) of every job that waits.
        wake_s: seconds until the plan may change without anything coming in.
        accounts: what is to be remembered of each job, and of `tenants`; `grown_at`, `turned_at` as in the state.
    """

    decisions: tuple[Decision, ...]
    waiting: tuple[tuple[JobId, str], ...]
    wake_s: float
    accounts: tuple[tuple[JobId, Account], ...] = ()
    tenants: tuple[TenantState, ...] = ()
    grown_at: float = 0.0
    turned_at: float = 0.0

    @property
    def summary(self) -> str:
        """One line for the workflow's history, such as ``place cnn, preempt gpt; 1 waits``."""
        acts = [f"{item.directive.action} {item.job}" for item in self.decisions if item.directive.action not in _TALK]
        shown = ", ".join(acts[:4]) + (f" and {len(acts) - 4} more" if len(acts) > 4 else "")
        waits = f"{len(self.waiting)} wait{'s' if len(self.waiting) == 1 else ''}" if self.waiting else ""
        return "; ".join(part for part in (shown, waits) if part) or "nothing to do"


@dataclass(frozen=True, slots=True)
class Committed:
    """The state with a plan recorded in it, and what is to be told to whom.

    Attributes:
        base: the state that was decided on, as canonical bytes.
    """

    state: ClusterState
    directives: tuple[AddressedDirective, ...]
    base: bytes
