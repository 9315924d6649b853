"""What the policy knows: nodes, pools of like nodes, jobs, tenants. Plain records; `Book` keeps them consistent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from math import inf

from sortedcontainers import SortedList

from scheduling.core.indexes import Buckets
from scheduling.core.settings import BASIC, LENT, LEVELS, PREMIUM, STANDARD


class State(IntEnum):
    """Where a job stands with its devices."""

    WAITING = 0
    """Has none."""
    CHANGING = 1
    """Starts, or changes its width or place: holds devices, delivers nothing, is not touched."""
    RUNNING = 2
    STOPPING = 3
    """Was told to stop; its devices are its own until it says that it has."""
    HELD = 4
    """A person holds it; it wants nothing."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A job as it is submitted.

    Attributes:
        ranks: its full width.
        tier: ``PREMIUM``, ``STANDARD`` or ``BASIC``.
        pools: where it may run, by preference.
        widths: at which it can run, ascending, the last is `ranks`; one where it cannot be resized.
        unit: every node holds a multiple of it, and so does every width.

    Raises:
        ValueError: sizes that make no sense, an unknown tier, no pool.
    """

    id: str
    ranks: int
    tier: int
    pools: tuple[str, ...]
    submitted: float
    widths: tuple[int, ...] = ()
    unit: int = 1
    tenant: str = "default"
    priority: int = 0

    def __post_init__(self) -> None:
        if self.tier not in (PREMIUM, STANDARD, BASIC):
            raise ValueError(f"Job {self.id} is of tier {self.tier}; tiers are premium, standard and basic.")
        if self.ranks < 1 or self.unit < 1 or not self.pools or not self.tenant:
            raise ValueError(f"Job {self.id} needs at least one rank, one device on a node, a pool and a tenant.")
        widths = self.widths or (self.ranks,)
        if widths[-1] != self.ranks or widths[0] < 1 or any(a >= b for a, b in pairwise(widths)):
            raise ValueError(f"Job {self.id}: widths ascend up to its {self.ranks} ranks, they are {widths}.")
        if any(width % self.unit for width in widths):
            raise ValueError(f"Job {self.id}: widths are multiples of {self.unit}, they are {widths}.")


class Node:
    """A node. `free` counts devices that nobody has and nobody is promised.

    Attributes:
        order: its place in the pool, by names; racks are contiguous. Ties go by it.
        low, mid: devices that jobs of the ranks lent and basic, and standard, have here.
        owed: devices that are being freed here, by the job they are for, in order.
        closed: nothing new is placed here (cordoned, drained, or about to be taken away).
        until: when a leased node goes away.
    """

    __slots__ = (
        "alive", "closed", "free", "held", "jobs", "low", "mid", "name", "order", "owed", "pool", "rack",
        "size", "until",
    )  # fmt: skip

    def __init__(self, name: str, pool: Pool, rack: Rack, size: int, order: str, until: float | None) -> None:
        self.name, self.pool, self.rack, self.size, self.order, self.until = name, pool, rack, size, order, until
        self.free = size
        self.held = 0
        self.low = 0
        self.mid = 0
        self.jobs: dict[Job, int] = {}
        self.owed: dict[Job, int] = {}
        self.closed = False
        self.alive = True


class Rack:
    """Nodes under one switch; `empty` of them are wholly free."""

    __slots__ = ("empty", "name", "nodes", "order")

    def __init__(self, name: str, order: str) -> None:
        self.name = name
        self.order = order
        self.empty = 0
        self.nodes: dict[str, Node] = {}


class Pool:
    """Nodes of one accelerator type and numerics class: a job stays within one.

    Attributes:
        size: devices of its largest node.
        sizes: how many live nodes have how many devices.
        capacity: devices of open nodes that are not leased: what promises are made of.
        devices: of all live nodes; `free` of them, `low` and `mid` as for nodes.
        hundredths: of devices, level times width summed over admitted jobs; `short`: devices that these lack.
        fixed: full widths of admitted premium jobs, which have no time to spare. `widest`: of each admitted standard
            job the least width at which it keeps its level: it must fit beside these.
        reserver: the job for which what becomes free on some nodes is kept.
        spares: nodes by devices that one standard job has there, in the order of its `spares_at`.
        gain: grows whenever somebody who failed before might now succeed.
    """

    __slots__ = (
        "by_free", "by_low", "by_mid", "by_order", "capacity", "devices", "fixed", "free", "gain", "hundredths", "key",
        "low", "mid", "nodes", "rack_by_order", "racks", "racks_by_empty", "reserver", "short", "size", "sizes",
        "spares", "widest",
    )  # fmt: skip

    def __init__(self, key: str) -> None:
        self.key = key
        self.size = 0
        self.sizes: dict[int, int] = {}
        self.nodes: dict[str, Node] = {}
        self.by_order: dict[str, Node] = {}
        self.racks: dict[str, Rack] = {}
        self.rack_by_order: dict[str, Rack] = {}
        self.racks_by_empty = Buckets()
        self.by_free = Buckets()
        self.by_low = Buckets()
        self.by_mid = Buckets()
        self.spares = Buckets()
        self.capacity = self.devices = self.free = self.low = self.mid = 0
        self.hundredths = 0
        self.fixed = 0
        self.widest: SortedList[int] = SortedList()
        self.short = 0
        self.reserver: Job | None = None
        self.gain = 0

    @property
    def promised(self) -> float:
        """Devices times level that are promised out of it."""
        return self.hundredths / 100


class Job:
    """A job, and what was promised and delivered to it.

    Attributes:
        rank: what it is served as now.
        given: devices by node, all that nobody else may have because of it.
        target: what it keeps when it has shrunk.
        claim: devices by node that are held for it, or owed to it by nodes where others are stopping.
        missing: how many of the claim are not free yet.
        claim_until: when the claim is given up.
        reserves: nobody was told to make way for the claim: what becomes free by itself is kept.
        admitted: since when its level is promised, out of the capacity of the pool `promised_in`.
        window_end: end of the hour that is counted now; `delivered` device-seconds in it.
        served: device-seconds since submission; `rate` devices deliver now, counted up to `at`.
        changed: when it was last told anything, for the `changes`-th time.
        due: when it must be looked at because its slack is nearly used up; infinite if not.
        spares_at: from when on it can do without its devices for long enough that its like may have them for a while;
            for as long as it is told nothing. Infinite where it has no level, or is narrow.
        key: its zero-slack time when it was last put in order; what it is ordered by until then.
        not_before: it is not placed earlier.
        holding: a person wants it held; it is once it has stopped.
        why: what it waits for: a code and figures for `reasons`.
    """

    __slots__ = (
        "admitted", "ask", "at", "below", "changed", "changes", "claim", "claim_until", "claimed_at", "delivered",
        "due", "given", "holding", "hours", "id", "key", "missing", "not_before", "pool", "promised_in", "rank",
        "ranks", "rate", "reserves", "served", "spares_at", "stamp", "state", "target", "tenant", "ticket", "unit",
        "waits_since", "why", "width", "widths", "window_end", "window_start",
    )  # fmt: skip

    def __init__(self, ask: Ask, tenant: Tenant) -> None:
        self.ask = ask
        self.id = ask.id
        self.ranks = ask.ranks
        self.unit = ask.unit
        self.widths = ask.widths or (ask.ranks,)
        self.tenant = tenant
        self.rank = BASIC if ask.tier == BASIC else LENT
        self.state = State.WAITING
        self.pool: Pool | None = None
        self.promised_in = ""
        self.width = 0
        self.given: dict[Node, int] = {}
        self.target: dict[Node, int] | None = None
        self.claim: dict[Node, int] = {}
        self.claimed_at = 0.0
        self.claim_until = 0.0
        self.reserves = False
        self.missing = 0
        self.admitted: float | None = None
        self.window_start = self.window_end = 0.0
        self.delivered = 0.0
        self.served = 0.0
        self.rate = 0
        self.at = ask.submitted
        self.changed = ask.submitted
        self.changes = 0
        self.due = inf
        self.key = inf
        self.waits_since = ask.submitted
        self.not_before = 0.0
        self.holding = False
        self.hours = 0
        self.below = 0
        self.spares_at = inf
        self.stamp = 0
        self.ticket = 0
        self.why: tuple[object, ...] = ()

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.state.name.lower()} {self.width}/{self.ranks}>"

    @property
    def guaranteed(self) -> bool:
        """Whether its tier has a level."""
        return self.ask.tier < LENT

    @property
    def taken(self) -> int:
        """Devices that it has or is promised."""
        return sum(self.given.values())


class Tenant:
    """Who pays, in a tree: ``org/team`` is below ``org``.

    Attributes:
        quota: devices times level that may be promised to it and those below it; None for any. What is not promised
            is lent to whoever has work.
        weight: its part of what is lent, beside others under the same parent.
        hundredths: of devices, promised; see `Pool`.
        usage: device-seconds up to `at`, those of a half-life before counted half; `rate` devices add to it.
    """

    __slots__ = ("at", "hundredths", "name", "parent", "quota", "rate", "usage", "weight")

    def __init__(self, name: str, parent: Tenant | None) -> None:
        self.name = name
        self.parent = parent
        self.quota: float | None = None
        self.weight = 1.0
        self.hundredths = 0
        self.usage = 0.0
        self.rate = 0
        self.at = 0.0

    @property
    def promised(self) -> float:
        """Devices times level that are promised to it and those below it."""
        return self.hundredths / 100


def least_width(ask: Ask) -> int:
    """The narrowest width at which its level can be kept."""
    level = LEVELS[ask.tier] - 1e-9
    return next(width for width in ask.widths or (ask.ranks,) if width >= level * ask.ranks)


def promise_of(ask: Ask) -> int:
    """Hundredths of devices that must be there for a job's level: whole numbers, so that sums do not drift."""
    return round(100 * LEVELS[ask.tier]) * ask.ranks


def rank_of(ask: Ask, admitted: bool) -> int:
    """What a job is served as."""
    if ask.tier == BASIC:
        return BASIC
    return ask.tier if admitted else LENT
