"""Folds what came in into the state, and records plans in it: who holds which device, and who may have taken up one.

A job holds what its newest notice lists, and what it was told and a later notice has not answered yet. A device is
free only when a notice says so, or its node is lost, or its job's workflow is gone and the node has nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from model.control import (
    AddressedDirective,
    InboxBatch,
    JobClosed,
    JobNotice,
    NodeNotice,
)
from model.ids import DeviceId, Epoch, JobId, NodeId, TenantId
from model.job_spec import Tier
from model.job_state import JobPhase
from model.orders import NodeOrder, QuotaOrder
from scheduling.accounts import service_of
from scheduling.constants import DRAIN_S, REMEMBER_S, SETTLE_S, STOPS_AT_ONCE, TELL_AGAIN_S
from scheduling.reconcile import heard_part, reconciled
from scheduling.state import (
    Account,
    ClusterState,
    Committed,
    Draining,
    Ended,
    JobState,
    NodeState,
    PartState,
    Plan,
    ServiceState,
    TenantState,
    Told,
    above,
    digest_of,
)

_MOVES = frozenset({"migrate", "resize"})
_WISHES = frozenset({"move", "resize"})
_STARTED = frozenset({JobPhase.STARTING, JobPhase.RUNNING, JobPhase.MOVING, JobPhase.RESIZING})


def fold(batches: Iterable[InboxBatch]) -> InboxBatch:
    """Joins batches: of each job, node and closed workflow only what counts."""
    jobs: dict[tuple[JobId, str], JobNotice] = {}
    nodes: dict[NodeId, NodeNotice] = {}
    closed: dict[tuple[JobId, str], JobClosed] = {}
    node_orders: dict[str, NodeOrder] = {}
    quota_orders: dict[str, QuotaOrder] = {}
    for batch in batches:
        for notice in batch.jobs:
            key = (notice.job, notice.workflow_run)
            known = jobs.get(key)
            if known is None or (known.generation, known.number) < (notice.generation, notice.number):
                # Put at the end: of two workflows of one job the one that was heard last replaces the other.
                jobs.pop(key, None)
                jobs[key] = notice
        nodes.update((notice.node, notice) for notice in batch.nodes)
        closed.update(((item.job, item.workflow_run), item) for item in batch.closed)
        node_orders.update((order.node, order) for order in batch.node_orders)
        quota_orders.update((order.tenant, order) for order in batch.quota_orders)
    return InboxBatch(
        tuple(jobs.values()),
        tuple(nodes.values()),
        tuple(closed.values()),
        tuple(node_orders.values()),
        tuple(quota_orders.values()),
    )


def apply(state: ClusterState, inbox: Iterable[InboxBatch], now: datetime) -> ClusterState:
    """The state after `inbox`; also drops what time has settled. Applying the same notices again changes no claim."""
    batch = fold(inbox)
    books = _Books(
        nodes={item.node: item for item in state.nodes},
        jobs={item.notice.job: item for item in state.jobs},
        draining=list(state.draining),
        ended={(item.job, item.workflow_run): item for item in state.ended},
        service={(item.tenant, item.tier): item for item in state.service},
        now=now,
    )
    for node in batch.nodes:
        books.hear_node(node)
    for notice in batch.jobs:
        books.hear_job(notice)
    for closed in batch.closed:
        books.hear_closed(closed)
    books.tidy()
    settling = state.settle_until if state.settle_until and state.settle_until > now else None
    after = replace(
        state,
        tick=state.tick + 1,
        nodes=tuple(sorted(books.nodes.values(), key=lambda item: item.node)),
        jobs=tuple(sorted(books.jobs.values(), key=lambda item: item.notice.job)),
        draining=tuple(sorted(books.draining, key=lambda item: (item.job, item.epoch))),
        ended=tuple(sorted(books.ended.values(), key=lambda item: (item.job, item.workflow_run))),
        settle_until=settling,
        ask=tuple(job for job in state.ask if job in books.jobs),
        cordoned=_ordered(state.cordoned, batch.node_orders),
        tenants=_granted(state.tenants, batch.quota_orders),
        service=tuple(sorted(books.service.values(), key=lambda item: (item.tenant, item.tier))),
    )
    return reconciled(after, now)


def _ordered(cordoned: tuple[tuple[str, bool], ...], orders: Iterable[NodeOrder]) -> tuple[tuple[str, bool], ...]:
    nodes = dict(cordoned)
    for order in orders:
        nodes.pop(order.node, None)
        if order.order != "uncordon":
            nodes[order.node] = order.order == "drain"
    return tuple(sorted(nodes.items()))


def _granted(tenants: tuple[TenantState, ...], orders: Iterable[QuotaOrder]) -> tuple[TenantState, ...]:
    known = {tenant.name: tenant for tenant in tenants}
    for order in orders:
        under = order.under or ""
        if under and order.tenant in above(under, known):
            under = ""  # a tree has no circles
        before = known.get(order.tenant) or TenantState(order.tenant)
        known[order.tenant] = replace(before, under=under, quota=order.quota, weight=order.weight)
    return tuple(known[name] for name in sorted(known))


def restored(state: ClusterState, now: datetime) -> ClusterState:
    """A state that may be older than what was told since: all jobs are asked, and nothing is given away for a while."""
    return replace(
        state,
        settle_until=now + timedelta(seconds=SETTLE_S),
        ask=tuple(job.notice.job for job in state.jobs),
    )


def commit(state: ClusterState, plan: Plan, now: datetime) -> Committed:
    """Records a plan. Ids of decisions follow from the state alone, so that deciding twice is deciding once."""
    base = state.to_json()
    digest = digest_of(base)
    jobs = {item.notice.job: item for item in state.jobs}
    accounts = dict(plan.accounts)
    directives: list[AddressedDirective] = []
    stops = 0
    for index, decision in enumerate(plan.decisions):
        job = jobs[decision.job]
        if decision.again and job.told is not None:
            directive = job.told.directive
            jobs[decision.job] = replace(job, told=replace(job.told, last_at=now, times=job.told.times + 1))
        else:
            generation, number = job.stamp
            account = accounts.get(decision.job)
            promised = account.admitted if account is not None else None
            directive = replace(
                decision.directive,
                decision=f"{state.tick}-{digest[:16]}-{index}",
                state_digest=digest,
                generation=generation,
                notice=number,
                admitted_at=None if promised is None else datetime.fromtimestamp(promised, UTC),
            )
            job = replace(job, promised=promised)
            if directive.action == "admit":
                jobs[decision.job] = job
            elif directive.action == "wait":
                told_wait = job.waiting if directive.request else directive.reason
                jobs[decision.job] = replace(job, waiting=told_wait, waiting_at=now)
            else:
                stops += decision.stops
                times = int(not decision.stops or stops <= STOPS_AT_ONCE)
                told = Told(directive, now, now, times, decision.devices, decision.beneficiary)
                jobs[decision.job] = replace(job, told=told, waiting="", waiting_at=None)
                if not times:
                    continue
        directives.append(AddressedDirective(decision.job, job.notice.workflow_run, directive))
    kept = (_accounted(job, accounts.get(name, job.account)) for name, job in jobs.items())
    asked = {item.job for item in plan.decisions}
    ask = tuple(job for job in state.ask if job not in asked)
    settle_until = state.settle_until
    if ask and settle_until is not None:
        settle_until = max(settle_until, now + timedelta(seconds=SETTLE_S))
    after = replace(
        state,
        jobs=tuple(sorted(kept, key=lambda item: item.notice.job)),
        ask=ask,
        settle_until=settle_until,
        tenants=plan.tenants,
        grown_at=plan.grown_at,
        turned_at=plan.turned_at,
    )
    return Committed(after, tuple(directives), base)


def _accounted(job: JobState, account: Account | None) -> JobState:
    """The job with an account: the very same where that is as it was, as of most, since what is the very same is not
    written again (`ClusterState.to_json`).
    """
    return job if account == job.account else replace(job, account=account)


@dataclass(slots=True)
class _Books:
    """The state under way."""

    nodes: dict[NodeId, NodeState]
    jobs: dict[JobId, JobState]
    draining: list[Draining]
    ended: dict[tuple[JobId, str], Ended]
    service: dict[tuple[TenantId, Tier], ServiceState]
    now: datetime
    named: dict[str, list[NodeId]] = field(default_factory=dict[str, list[NodeId]])
    """All incarnations of a node."""

    def __post_init__(self) -> None:
        for node in self.nodes:
            self.named.setdefault(node.name, []).append(node)

    def hear_node(self, notice: NodeNotice) -> None:
        others = [node for node in self.named.get(notice.node.name, ()) if node != notice.node and node in self.nodes]
        if notice.alive and any(node.incarnation > notice.node.incarnation for node in others):
            return  # a late word of an incarnation that another one has replaced
        known = self.nodes.get(notice.node)
        if known is not None and not known.alive:
            return  # an incarnation that was given up never comes back: its jobs were told to go on elsewhere
        if known is None:
            self.named.setdefault(notice.node.name, []).append(notice.node)
        self.nodes[notice.node] = NodeState(
            notice.node,
            notice.alive,
            notice.devices,
            notice.numerics,
            notice.jobs,
            self.now,
            self._parts(known, notice),
        )
        if notice.alive:
            for node in others:
                self.nodes[node] = replace(self.nodes[node], alive=False, jobs=())

    def _parts(self, known: NodeState | None, notice: NodeNotice) -> tuple[PartState, ...]:
        before = {(part.job, part.epoch): part for part in known.parts} if known is not None else {}
        told = notice.device_ms if len(notice.device_ms) == len(notice.jobs) else (None,) * len(notice.jobs)
        found: list[PartState] = []
        for (name, epoch), device_ms in zip(notice.jobs, told, strict=True):
            job = self.jobs.get(name)
            since = job.notice.since if job is not None else None
            found.append(heard_part(before.get((name, epoch)), name, epoch, device_ms, self.now, since))
        return tuple(found)

    def hear_job(self, notice: JobNotice) -> None:
        ended = self.ended.get((notice.job, notice.workflow_run))
        if ended is not None:
            if notice.generation <= ended.generation:
                return
            self.ended.pop((notice.job, notice.workflow_run))
        known = self.jobs.get(notice.job)
        if known is not None and known.notice.workflow_run != notice.workflow_run:
            self._forget(known)
            known = None
        if known is not None and (notice.generation, notice.number) <= known.stamp:
            return
        before = known or JobState(notice)
        if notice.phase.ended:
            # All that it was told is void: a job that has ended takes up nothing.
            self._forget(replace(before, notice=notice, told=None))
            return
        told = _unanswered(before.told, notice, self.now)
        was = before.told.directive if before.told is not None and told is None else None
        moved = was is not None and was.action in _MOVES and set(was.devices) == set(notice.devices)
        if notice.demand.numerics is None:
            notice = replace(notice, demand=replace(notice.demand, numerics=before.notice.demand.numerics))
        waits = notice.wants == "devices" and not notice.held and not notice.devices
        self.jobs[notice.job] = replace(
            before,
            notice=notice,
            told=told,
            waiting=before.waiting if waits else "",
            answered=was.request if was and moved else before.answered,
            stuck=notice.phase is JobPhase.RUNNING and not moved
            if was is not None and was.action in _MOVES
            else before.stuck and bool(notice.devices),
        )

    def hear_closed(self, closed: JobClosed) -> None:
        known = self.jobs.get(closed.job)
        if known is not None and known.notice.workflow_run == closed.workflow_run:
            self._forget(known)

    def tidy(self) -> None:
        for name, job in self.jobs.items():
            self.jobs[name] = self._bound(replace(job, told=_unanswered(job.told, job.notice, self.now)))
        for name, node in self._alive_later().items():
            self.nodes[name] = node
        used = {device.node for job in self.jobs.values() for device in job.held_devices}
        self.nodes = {name: node for name, node in self.nodes.items() if node.alive or name in used}
        self.draining = [left for item in self.draining if (left := self._left(item)) is not None]
        oldest = self.now - timedelta(seconds=REMEMBER_S)
        self.ended = {key: item for key, item in self.ended.items() if item.at > oldest}

    def _bound(self, job: JobState) -> JobState:
        """Binds a job to the numerics class of the devices that it holds, if its notice does not say it itself."""
        notice = job.notice
        if notice.demand.numerics is not None or not notice.devices:
            return job
        node = self.nodes.get(notice.devices[0].node)
        if node is None:
            return job
        return replace(job, notice=replace(notice, demand=replace(notice.demand, numerics=node.numerics)))

    def _alive_later(self) -> dict[NodeId, NodeState]:
        """Incarnations that jobs name and nobody has told of, where a later one is alive: they are over."""
        newest = {node.name: item for node, item in self.nodes.items() if item.alive}
        found: dict[NodeId, NodeState] = {}
        for job in self.jobs.values():
            for device in job.held_devices:
                later = newest.get(device.node.name)
                if device.node not in self.nodes and later and later.node.incarnation > device.node.incarnation:
                    found[device.node] = NodeState(device.node, False, (), later.numerics)
        return found

    def _forget(self, job: JobState) -> None:
        notice = job.notice
        demand = notice.demand
        before = self.service.get((demand.tenant, demand.tier)) or ServiceState(demand.tenant, demand.tier)
        self.service[demand.tenant, demand.tier] = before.plus(service_of(job, self.now, over=True))
        self.jobs.pop(notice.job, None)
        self.ended[notice.job, notice.workflow_run] = Ended(
            notice.job, notice.workflow_run, notice.generation, self.now
        )
        if job.held_devices:
            # A place that it has taken up unheard has one epoch more, or some where attempts failed: any counts.
            self.draining.append(Draining(notice.job, Epoch(notice.epoch + 1), job.held_devices, self.now))

    def _left(self, item: Draining) -> Draining | None:
        """What is still kept of a job's devices: until its node has said, after the end, that it has nothing of it."""
        # Under its successor's id the node may have a later epoch: that one's devices are the successor's.
        last = item.epoch if item.job in self.jobs else None
        settled = item.since + timedelta(seconds=DRAIN_S)
        listed = {
            node.node
            for node in self.nodes.values()
            if any(job == item.job and (last is None or epoch <= last) for job, epoch in node.jobs)
        }
        before = set(item.listed)

        def busy(device: DeviceId) -> bool:
            node = self.nodes.get(device.node)
            if node is None:
                return self.now < settled
            said_so = node.node in before or (node.heard_at is not None and node.heard_at >= settled)
            return node.alive and (node.node in listed or not said_so)

        devices = tuple(device for device in item.devices if busy(device))
        return replace(item, devices=devices, listed=tuple(sorted(before | listed))) if devices else None


def _unanswered(told: Told | None, notice: JobNotice, now: datetime) -> Told | None:
    """What is left of `told` when the job's newest notice is `notice`."""
    if told is None:
        return None
    directive = told.directive
    later = (notice.generation, notice.number) > (directive.generation, directive.notice)
    if not later:
        return told
    match directive.action:
        case "place":
            # Taken up, it lists devices. On its way there it may list none yet. Anything else: it was not taken up,
            # and since this notice is newer than the one that it answers, it never will.
            starts = notice.phase in _STARTED and notice.wants == "nothing" and not notice.held
            return told if not notice.devices and starts else None
        case "migrate" | "resize":
            # Of the scheduler's own, as with `place`: a job that has sent a later notice does not take it up any more.
            under_way = notice.phase in (JobPhase.MOVING, JobPhase.RESIZING) or (
                notice.wants in _WISHES and notice.request == directive.request
            )
            return told if under_way and set(notice.devices) != set(directive.devices) else None
        case "preempt":
            if not notice.devices or notice.generation != directive.generation:
                return None
            # It runs on: either its notice and the directive have crossed, or its cut failed. Time tells.
            failed = notice.phase is not JobPhase.SUSPENDING and now >= told.last_at + timedelta(seconds=TELL_AGAIN_S)
            return None if failed else told
        case "lost":
            on_lost = any(device.node in directive.nodes for device in notice.devices)
            late = now >= told.last_at + timedelta(seconds=TELL_AGAIN_S)
            return told if on_lost and not late else None
        case "refuse":
            return told if notice.wants in _WISHES and notice.request == directive.request else None
        case _:
            return None
