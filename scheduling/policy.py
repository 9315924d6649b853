"""The policy: a pure function of a state and a time.

Lost nodes first, then waiting jobs in one total order (tier, priority, submission), which is also the order of who
gives way to whom; then moves that persons ask for. Devices that jobs give up are kept for the job that they were
taken for, and a job before it in the order may have them: nothing else, so that two requesters never chase each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from model.control import TELL_AGAIN, Directive
from model.ids import DeviceId, JobId
from scheduling import reasons
from scheduling.constants import (
    DRAIN_S,
    IDLE_S,
    PATIENCE_S,
    PLACES_AT_ONCE,
    POLICY,
    TELL_AGAIN_MOST_S,
    TELL_AGAIN_S,
    WAIT_GAP_S,
    WAITS_AT_ONCE,
)
from scheduling.fitting import Fit, Gang, fit
from scheduling.fleet import (
    TIER_RANK,
    Fleet,
    Rooms,
    class_key,
    cool_until,
    count,
    find,
    gang_of,
    may_give_way,
    order,
)
from scheduling.reclaim import victims_for
from scheduling.state import Claim, ClusterState, Decision, JobState, Plan, Told


def decide(state: ClusterState, now: datetime) -> Plan:
    """What is to be done at `now` (UTC). Equal states and times give equal plans."""
    return _Round(state, now).plan()


class _Round:
    """One plan in the making."""

    def __init__(self, state: ClusterState, now: datetime) -> None:
        self.state = state
        self.now = now
        self.fleet = Fleet(state, now)
        self.decisions: dict[JobId, Decision] = {}
        self.claims: list[Claim] = []
        self.waiting: dict[JobId, str] = {}
        self.places = 0
        # A gang that found no way finds none later in the round either: devices only become fewer.
        self.blocked: dict[tuple[object, ...], str] = {}
        self.looks: list[datetime] = []  # times at which the plan may change by itself

    def plan(self) -> Plan:
        self._ask()
        self._tell_again()
        waiting = sorted(filter(_waits, self.state.jobs), key=order)
        if self.state.settle_until and self.state.settle_until > self.now:
            self.looks.append(self.state.settle_until)
            for job in waiting:
                self.waiting[job.notice.job] = reasons.settling()
        else:
            self._lost()
            for job in waiting:
                if self.places == PLACES_AT_ONCE:
                    self.looks.append(self.now + timedelta(milliseconds=100))
                    break
                if job.notice.job not in self.decisions:
                    self._serve(job)
            # Where some were not served yet, nobody knows what is left for moves.
            moving = [job for job in self.state.jobs if job.notice.wants == "move" and self.places < PLACES_AT_ONCE]
            for job in sorted(moving, key=order):
                done = job.notice.request == job.answered != ""
                if job.told is None and job.notice.job not in self.decisions and not done:
                    self._answer(job)
        self._tell_waiting()
        self.looks += [item.since + timedelta(seconds=DRAIN_S) for item in self.state.draining]
        later = [(time - self.now).total_seconds() for time in self.looks if time > self.now]
        wake_s = round(min([*later, IDLE_S]) + 0.01, 3)
        return Plan(tuple(self.decisions.values()), tuple(self.claims), tuple(self.waiting.items()), wake_s)

    # -- what was told --------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        for job in self.state.ask:
            self._decide(job, self._directive("wait", reasons.ask(), request=TELL_AGAIN))

    def _tell_again(self) -> None:
        for job in self.state.jobs:
            if job.told is None or job.notice.job in self.decisions:
                continue
            due = job.told.last_at + timedelta(seconds=_patience(job.told))
            if due <= self.now:
                told = job.told
                self._decide(job.notice.job, told.directive, told.devices, told.beneficiary, again=True)
                due = self.now + timedelta(seconds=_patience(told) * 2)
            self.looks.append(due)

    def _tell_waiting(self) -> None:
        told = 0
        for job in self.state.jobs:
            name = job.notice.job
            if name not in self.waiting or name in self.decisions:
                continue
            reason = _sentence(self.waiting[name])
            if reason == job.waiting:
                continue
            due = job.waiting_at + timedelta(seconds=WAIT_GAP_S) if job.waiting_at and job.waiting else self.now
            if due > self.now or told == WAITS_AT_ONCE:
                self.looks.append(max(due, self.now + timedelta(seconds=WAIT_GAP_S)))
                continue
            told += 1
            self._decide(name, self._directive("wait", reason))

    # -- lost nodes -----------------------------------------------------------------------------------------------

    def _lost(self) -> None:
        for job in self.state.jobs:
            dead = {device.node for device in job.held_devices if self._is_dead(device)}
            if job.told and job.told.directive.action == "lost":
                dead -= set(job.told.directive.nodes)
            if dead:
                nodes = tuple(sorted(dead))
                # What it may have taken up by now stays kept: only its next notice tells.
                devices = job.told.devices if job.told else ()
                directive = self._directive("lost", reasons.lost(job.notice, nodes), nodes=nodes)
                self._decide(job.notice.job, directive, devices)

    def _is_dead(self, device: DeviceId) -> bool:
        node = self.fleet.nodes.get(device.node)
        return node is not None and not node.alive

    # -- waiting jobs ---------------------------------------------------------------------------------------------

    def _serve(self, job: JobState) -> None:
        """Places a waiting job, or keeps devices for it and preempts, or says why it waits."""
        fleet, demand, name = self.fleet, job.notice.demand, job.notice.job
        gang = gang_of(demand)
        shape = (demand.tier, demand.numerics and class_key(demand.numerics), demand.accelerator, gang)
        reason = self.blocked.get(shape) or self._never(job, gang)
        if reason:
            self.waiting[name] = self.blocked[shape] = reason
            return
        usable = fleet.usable(demand)
        placed = self._find(job, gang, usable)
        cool = cool_until(job)
        if placed and cool and cool > self.now:
            self.looks.append(cool)
            self._claim(job, placed, reasons.cooling((cool - self.now).total_seconds()))
        elif placed:
            text = reasons.placed(job.notice, placed.devices, count(usable), job.notice.epoch > 0)
            directive = self._directive(
                "place", text, devices=placed.devices, device_of_rank=placed.device_of_rank, request=job.notice.request
            )
            fleet.take(placed.devices)
            self.places += 1
            self._decide(name, directive, placed.devices)
        else:
            self._reclaim(job, gang, usable, shape)

    def _find(self, job: JobState, gang: Gang, usable: Rooms) -> Fit | None:
        """A fit, on what was kept for the job before if that will do: plans should not wander."""
        if job.claims:
            kept = set(job.claims)
            claimed = {
                key: {node: [device for device in devices if device in kept] for node, devices in rooms.items()}
                for key, rooms in usable.items()
            }
            if placed := find(gang, claimed):
                return placed
        return find(gang, usable)

    def _reclaim(self, job: JobState, gang: Gang, usable: Rooms, shape: tuple[object, ...]) -> None:
        fleet, demand, name = self.fleet, job.notice.demand, job.notice.job
        free = count(usable)
        soon = fleet.usable(demand, freeing=True)
        target = self._find(job, gang, soon)
        if target is None:
            lower = [other for other in self.state.jobs if self._gives_way(other, job)]
            ready = [other for other in lower if self._is_ready(other)]
            victims = victims_for(gang, soon, ready)
            if victims is None:
                self.waiting[name] = self.blocked[shape] = self._blocked(job, gang, free, soon, lower, ready)
                self._reserve(job, gang, usable)
                return
            text = reasons.preempted(job.notice, gang.width, free, [victim.notice for victim in victims])
            for victim in victims:
                fleet.surrender(victim)
                self._decide(victim.notice.job, self._directive("preempt", text), beneficiary=name)
            target = find(gang, fleet.usable(demand, freeing=True))
            if target is None:  # proved above
                raise AssertionError(f"The victims chosen for {name} do not make it fit.")
        givers = [giver.notice for giver in fleet.givers(target.devices)]
        self._claim(job, target, reasons.claimed(gang.width, free, givers))

    def _claim(self, job: JobState, target: Fit, reason: str) -> None:
        self.fleet.keep(job.notice.job, target.devices)
        self.claims.append(Claim(job.notice.job, target.devices))
        self.waiting[job.notice.job] = reason

    def _gives_way(self, other: JobState, job: JobState) -> bool:
        demand = job.notice.demand
        lower = TIER_RANK[other.notice.demand.tier] > TIER_RANK[demand.tier]
        if not lower or not may_give_way(other) or other.notice.job in self.decisions:
            return False
        pools = {pool.key for pool in self.fleet.suits(demand)}
        devices = self.fleet.of_its_model(demand, other.notice.devices)
        return any(self.fleet.pool_of[device.node] in pools for device in devices)

    def _is_ready(self, job: JobState) -> bool:
        cool = cool_until(job)
        if cool is None or cool <= self.now:
            return True
        self.looks.append(cool)
        return False

    def _never(self, job: JobState, gang: Gang) -> str:
        """Why a job can never run on the fleet as it is; empty if it can."""
        fleet, demand = self.fleet, job.notice.demand
        if not fleet.alive:
            return reasons.no_nodes()
        capacity = fleet.capacity(demand)
        if find(gang, capacity):
            return ""
        most = max((len(devices) for rooms in capacity.values() for devices in rooms.values()), default=0)
        return reasons.never(demand, gang.width, count(capacity), most)

    def _blocked(
        self,
        job: JobState,
        gang: Gang,
        free: int,
        soon: Rooms,
        lower: Sequence[JobState],
        ready: Sequence[JobState],
    ) -> str:
        fleet, demand = self.fleet, job.notice.demand
        theirs = sum(len(fleet.of_its_model(demand, other.notice.devices)) for other in lower)
        everything = fleet.with_jobs(demand, soon, lower)
        if len(ready) < len(lower) and find(gang, everything):
            cool = max(time for other in lower if (time := cool_until(other)))
            return reasons.victims_settle(gang.width, free, theirs, (cool - self.now).total_seconds())
        if find(gang, fleet.with_draining(demand, everything)):
            return reasons.draining(gang.width, free)
        return reasons.blocked(gang.width, free, theirs, count(fleet.kept(demand)))

    def _reserve(self, job: JobState, gang: Gang, usable: Rooms) -> None:
        """Smaller jobs of its tier may overtake a blocked job for a while; then free devices are kept for it."""
        patient_until = (job.waits_since or self.now) + timedelta(seconds=PATIENCE_S)
        if patient_until > self.now:
            self.looks.append(patient_until)
            return
        pools = [[device for devices in rooms.values() for device in devices] for rooms in usable.values()]
        kept = max(pools, key=len)[: gang.width] if pools else []
        self.fleet.kept_in_tier[job.notice.demand.tier].update(kept)

    # -- persons' moves -------------------------------------------------------------------------------------------

    def _answer(self, job: JobState) -> None:
        notice, fleet = job.notice, self.fleet
        name = notice.move_to or ""
        node = fleet.alive.get(name) or fleet.alive.get(name.rpartition("@")[0])
        width = len(notice.devices)
        if node is None:
            return self._refuse(job, reasons.unknown_node(name, fleet.alive))
        if not notice.devices:
            return self._refuse(job, reasons.nothing_to_move(notice))
        if all(device.node == node.node for device in notice.devices):
            return self._refuse(job, reasons.already_there(name))
        demand, pool = notice.demand, fleet.pool_of[node.node]
        there = fleet.capacity(demand).get(pool, {}).get(node.node)
        if there is None:
            return self._refuse(job, reasons.node_unsuitable(name, "its numerics class is another"))
        if not there:
            return self._refuse(job, reasons.node_unsuitable(name, f"it has no {demand.accelerator or 'device'}"))
        usable = fleet.usable(demand)[pool][node.node]
        free = len(usable)
        placed = fit(Gang(demand.ranks, width, demand.ranks_per_group), {node.node: usable})
        if placed is None:
            return self._refuse(job, reasons.node_full(name, width, free))
        fleet.take(placed.devices)
        directive = self._directive(
            "migrate",
            reasons.moved(notice, node.node, width, free),
            devices=placed.devices,
            device_of_rank=placed.device_of_rank,
            request=notice.request,
        )
        return self._decide(notice.job, directive, placed.devices)

    def _refuse(self, job: JobState, reason: str) -> None:
        self._decide(job.notice.job, self._directive("refuse", reason, request=job.notice.request))

    # -- helpers --------------------------------------------------------------------------------------------------

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


def _waits(job: JobState) -> bool:
    notice = job.notice
    return notice.wants == "devices" and not notice.held and not notice.devices and job.told is None


def _patience(told: Told) -> float:
    return min(TELL_AGAIN_S * 2 ** (told.times - 1), TELL_AGAIN_MOST_S)
