"""What a cluster's scheduler knows: nodes, jobs, what each job holds, and what it was told and has not answered yet.

A `ClusterState` is a value. `scheduling.ledger.apply` folds what came in, `scheduling.policy.decide` makes a plan of
it, `scheduling.ledger.commit` records the plan. As canonical JSON it is the scheduler's snapshot, named by its digest.
All collections are sorted tuples, so that equal states are equal bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime

import orjson

from model.codec import from_json, to_json
from model.control import AddressedDirective, Directive, JobNotice
from model.ids import DeviceId, Epoch, Generation, JobId, NodeId
from model.manifest import NumericsClass
from model.shape import Shape

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class NodeState(Shape):
    """A node. One that is not alive is kept as long as a job holds devices there that it must be told to give up.

    Attributes:
        devices: with their accelerator models, in the node's order.
        jobs: (job, epoch) of what the node said it has.
        heard_at: when it was told of last.
    """

    node: NodeId
    alive: bool
    devices: tuple[tuple[DeviceId, str], ...]
    numerics: NumericsClass
    jobs: tuple[tuple[JobId, Epoch], ...] = ()
    heard_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Told(Shape):
    """A directive that a job has been told, until a notice shows what came of it.

    Attributes:
        devices: what nobody else may get in the meantime, beside what the job's notice lists.
        first_at: when it was decided.
        last_at: when it was told the last time.
        times: how often it was told.
        beneficiary: for ``preempt``: the job that gets the devices.
    """

    directive: Directive
    first_at: datetime
    last_at: datetime
    times: int = 1
    devices: tuple[DeviceId, ...] = ()
    beneficiary: JobId | None = None


@dataclass(frozen=True, slots=True)
class JobState(Shape):
    """A job by its newest notice.

    Attributes:
        told: what it has not answered yet.
        claims: devices that are kept for it while others give theirs up.
        waiting: the reason for waiting that it was told last, and when.
        waits_since: since when it wants devices and has none.
        changed_at: when it was last placed, moved or preempted: it is left alone for a while.
        answered: the request to move that was done last; its notice may still name it for a moment.
    """

    notice: JobNotice
    told: Told | None = None
    claims: tuple[DeviceId, ...] = ()
    waiting: str = ""
    waiting_at: datetime | None = None
    waits_since: datetime | None = None
    changed_at: datetime | None = None
    answered: str = ""

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

    def job(self, job: JobId) -> JobState | None:
        """A job by its id; a scan, for tests and people."""
        return next((state for state in self.jobs if state.notice.job == job), None)

    def to_json(self) -> bytes:
        """Canonical bytes: equal for equal states."""
        # Sorted keys: the precision flags of a numerics class come in the order in which a node told them.
        return orjson.dumps(orjson.loads(to_json(self)), option=orjson.OPT_SORT_KEYS)

    @classmethod
    def from_json(cls, data: bytes) -> ClusterState:
        """Reads a snapshot.

        Raises:
            ModelError: ``model.json`` or ``model.invalid``.
        """
        return from_json(cls, data)


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


@dataclass(frozen=True, slots=True)
class Claim(Shape):
    """Devices kept for a job until it can be placed on them."""

    job: JobId
    devices: tuple[DeviceId, ...]


@dataclass(frozen=True, slots=True)
class Plan(Shape):
    """What is to be done now.

    Attributes:
        decisions: at most one for each job, in the order in which they were made.
        claims: all claims from now on; others lapse.
        waiting: (job, reason) of every job that waits.
        wake_s: seconds until the plan may change without anything coming in.
    """

    decisions: tuple[Decision, ...]
    claims: tuple[Claim, ...]
    waiting: tuple[tuple[JobId, str], ...]
    wake_s: float

    @property
    def summary(self) -> str:
        """One line for the workflow's history, such as ``place cnn, preempt gpt; 1 waits``."""
        acts = [f"{item.directive.action} {item.job}" for item in self.decisions if item.directive.action != "wait"]
        shown = ", ".join(acts[:4]) + (f" and {len(acts) - 4} more" if len(acts) > 4 else "")
        waits = f"{len(self.waiting)} wait{'s' if len(self.waiting) == 1 else ''}" if self.waiting else ""
        return "; ".join(part for part in (shown, waits) if part) or "nothing to do"


@dataclass(frozen=True, slots=True)
class Committed:
    """The state with a plan recorded in it, and what is to be told to whom."""

    state: ClusterState
    directives: tuple[AddressedDirective, ...]
