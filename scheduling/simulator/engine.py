"""Lets a trace happen under one policy: the policy decides at every event, jobs do what they are told after a while."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from model.job_spec import Tier
from scheduling.core.actions import Action
from scheduling.core.book import Book
from scheduling.core.model import Ask, Job
from scheduling.core.reasons import standing
from scheduling.core.settings import BASIC, LEVELS, PREMIUM, STANDARD, Settings
from scheduling.simulator.meter import Meter
from scheduling.simulator.outcome import JobOutcome, Outcome
from scheduling.simulator.policies import POLICIES, SimulatedPolicy
from scheduling.simulator.workload import Costs, Failures, FleetShape, TraceJob

SAMPLE_S = 600.0
LEASE_S = 30.0
"""Until a failed node is known to be gone."""

KILLED_CHECKPOINT_S = 3600.0
"""How often jobs checkpoint by themselves, under a policy that kills."""

POOL = "pool"
STUCK_S = 7 * 86_400.0
_TIERS = {Tier.PREMIUM: PREMIUM, Tier.STANDARD: STANDARD, Tier.BASIC: BASIC}


def simulate(
    jobs: Sequence[TraceJob],
    fleet: FleetShape,
    policy: str,
    *,
    costs: Costs | None = None,
    failures: Failures | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    settings: Settings | None = None,
) -> Outcome:
    """Runs a trace to its end. Every job must have a tier and fit the fleet; `progress` is told how many have ended.

    The policy's own `settings` are the live ones, with the pause that `costs` tells it.

    Raises:
        KeyError: no such policy.
    """
    run = Run(jobs, fleet, policy, costs or Costs(), failures or Failures(), seed, progress, settings)
    return run.run()


class Running:
    """A job under way, as the world knows it: how much it still has to do."""

    __slots__ = (
        "at", "done_s", "durable_s", "furthest_s", "job", "meters", "out", "rate", "resumed_at", "stamp", "there_at",
        "trace", "width",
    )  # fmt: skip

    def __init__(self, trace: TraceJob, job: Job, out: JobOutcome) -> None:
        self.trace = trace
        self.job = job
        self.out = out
        self.done_s = 0.0
        self.durable_s = 0.0  # what the newest checkpoint has of it
        self.furthest_s = 0.0  # the most of it that ever was
        self.width = 0
        self.rate = 0
        self.at = trace.submit_s
        self.resumed_at = 0.0
        self.stamp = 0
        self.there_at = 0.0  # when the bytes of its checkpoint are where it is to go on
        level = LEVELS[job.ask.tier]
        self.meters = [Meter(trace.submit_s, job.ranks, level)] if job.guaranteed else []


class Run:
    """One run. Events are (time, number, what to call)."""

    def __init__(
        self,
        jobs: Sequence[TraceJob],
        fleet: FleetShape,
        policy: str,
        costs: Costs,
        failures: Failures,
        seed: int | str,
        progress: Callable[[int], None] | None,
        settings: Settings | None,
        home: str = "",
    ) -> None:
        self.home = home
        self.costs, self.failures, self.fleet = costs, failures, fleet
        self.rng = random.Random(f"{seed}/{failures.seed}")
        self.kind = POLICIES[policy]
        self.book = Book(self.kind.tuned(replace(settings or Settings(), pause_s=costs.resize_s)))
        self.policy: SimulatedPolicy = self.kind.make(self.book)
        self.out = Outcome(policy)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.number = 0
        self.jobs: dict[str, Running] = {}
        self.left = len(jobs)
        self.wake = float("inf")
        self.progress = progress
        self.allocated = 0
        self.sampled_at = -SAMPLE_S
        self.progressed_at = max((trace.submit_s for trace in jobs), default=0.0)
        for trace in jobs:
            self.at(trace.submit_s, lambda trace=trace: self.submit(trace))
        for index in range(fleet.nodes):
            self.add_node(index)
        self.next_failure()

    def run(self) -> Outcome:
        """Until every job has ended, or none gets any further."""
        started = time.process_time()
        while self.left and self.events and not self.stuck():
            self.step(self.due())
        self.out.cpu_s = time.process_time() - started
        return self.close()

    @property
    def devices(self) -> int:
        """Those of healthy nodes."""
        return self.book.pools[POOL].devices

    def due(self) -> float:
        """When something happens next; infinite if nothing does."""
        return min(self.events[0][0], self.wake) if self.events else self.wake

    def step(self, at: float) -> None:
        """What happens at a time, and what the policy makes of it."""
        clock = time.thread_time  # not wall: what else the machine does is no cost of a decision
        out = self.out
        self.pass_by(at)
        begun = clock()
        while self.events and self.events[0][0] <= at:
            heapq.heappop(self.events)[2]()
        plan = self.policy.plan(at)
        spent = clock() - begun
        out.policy_cpu_s += spent
        if plan.actions:
            out.decisions += len(plan.actions)
            out.decision_us.append(spent * 1e6 / len(plan.actions))
            for action in plan.actions:
                self.act(action)
        self.wake = plan.wake if plan.wake is not None else float("inf")
        if self.wake <= at:
            self.wake = at + 1e-3

    def stuck(self) -> bool:
        """Whether for long no job got further than it ever was, as where nodes fail before there is a checkpoint."""
        if self.now - self.progressed_at <= STUCK_S:
            return False
        for running in self.jobs.values():
            if running.done_s + running.rate / running.job.ranks * (self.now - running.at) > running.furthest_s:
                self.progressed_at = self.now
                return False
        return True

    def pass_by(self, until: float) -> None:
        """Time goes by in which nothing happens."""
        self.integrate(until)
        self.now = until

    def close(self) -> Outcome:
        """What came of it, when nothing more is to happen."""
        self.out.span_s = self.now
        for job in self.book.jobs.values():
            self.out.reasons[job.id] = standing(job, self.now)
        return self.out

    # -- the world ------------------------------------------------------------------------------------------------

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Something happens at a time."""
        self.number += 1
        heapq.heappush(self.events, (when, self.number, what))

    def integrate(self, until: float) -> None:
        """Counts devices up to `until`."""
        pool = self.book.pools[POOL]
        span = until - self.now
        out = self.out
        used = min(self.allocated, pool.devices)
        out.busy_device_s += span * used
        out.healthy_device_s += span * pool.devices
        if self.book.waiting.count:
            out.asked_busy_s += span * used
            out.asked_healthy_s += span * pool.devices
        if until - self.sampled_at >= SAMPLE_S:
            self.sampled_at = until
            out.samples.append((until, used, pool.devices, self.book.waiting.count))

    def submit(self, trace: TraceJob) -> None:
        """A job of the trace arrives."""
        assert trace.tier is not None
        widths = _widths(trace) if self.kind.elastic else (trace.devices,)
        ask = Ask(
            trace.id, trace.devices, _TIERS[trace.tier], (POOL,), self.now, widths, trace.unit, trace.tenant
        )  # fmt: skip
        job = self.book.submit(ask, self.now)
        out = JobOutcome(
            trace.id, trace.tier, trace.tenant, trace.devices, self.now, trace.duration_s, home=self.home
        )  # fmt: skip
        self.out.jobs.append(out)
        self.jobs[trace.id] = Running(trace, job, out)
        self.policy.arrived(job, trace.duration_s)

    def act(self, action: Action) -> None:
        """A job does what it was told, after a while."""
        running = self.jobs[action.job.id]
        self.advance(running)
        running.rate = 0
        stamp = self.stamp(running)
        pause = self.costs.resize_s
        if action.kind == "preempt":
            running.out.preemptions += 1
            if self.kind.kills:
                self.go_back(running, KILLED_CHECKPOINT_S)
            else:
                running.durable_s = running.done_s
            self.at(self.now + (0.0 if self.kind.kills else pause / 2), lambda: self.stopped(running, stamp))
            return
        if action.kind == "resize":
            running.out.resizes += 1
        elif action.kind == "move":
            running.out.moves += 1
        elif running.out.started_s is None:
            pause = self.costs.start_s
        elif not self.kind.kills:
            pause = pause / 2 + max(0.0, running.there_at - self.now)
        self.allocate(running, sum(action.places.values()))
        self.at(self.now + pause, lambda: self.run_on(running, stamp))

    def stamp(self, running: Running) -> int:
        """What was going to happen to it before does not happen."""
        running.stamp += 1
        return running.stamp

    def allocate(self, running: Running, width: int) -> None:
        """So many devices are given to it."""
        self.allocated += width - running.width
        running.width = width

    def run_on(self, running: Running, stamp: int) -> None:
        """It runs on what it was given."""
        if running.stamp != stamp:
            return
        self.advance(running)
        job = running.job
        self.book.running(job, self.now)
        running.rate = running.width
        running.resumed_at = self.now
        running.durable_s = running.done_s
        if running.out.started_s is None:
            running.out.started_s = self.now
        left = (running.trace.duration_s - running.done_s) * job.ranks / running.width
        self.at(self.now + max(left, 0.0), lambda: self.finish(running, stamp))

    def stopped(self, running: Running, stamp: int) -> None:
        """None of its processes is left."""
        if running.stamp == stamp:
            self.allocate(running, 0)
            self.book.stopped(running.job, self.now)
            self.policy.stopped(running.job)

    def finish(self, running: Running, stamp: int) -> None:
        """It has done all that it had to do."""
        if running.stamp != stamp:
            return
        self.advance(running)
        self.stamp(running)
        self.allocate(running, 0)
        job, out = running.job, running.out
        out.ended_s, out.admitted_s = self.now, job.admitted
        self.book.finish(job, self.now)
        self.policy.finished(job)
        for meter in running.meters:
            meter.finish()
        if running.meters:
            first = running.meters[0]
            out.hours_since_submission = first.hours
            out.below_since_submission = first.below + first.short_below
            if job.admitted is not None:
                last = running.meters[-1]
                out.hours, out.below, out.excused = last.hours, last.below, last.excused
                out.short_below = last.short_below
        del self.jobs[job.id]
        self.left -= 1
        if self.progress is not None:
            self.progress(1)

    def advance(self, running: Running) -> None:
        """Counts what was delivered since the last call."""
        job, now = running.job, self.now
        if job.admitted is not None and len(running.meters) == 1 and job.admitted > running.out.submit_s:
            running.meters.append(Meter(job.admitted, job.ranks, LEVELS[job.ask.tier]))
        for meter in running.meters:
            meter.advance(now, running.rate)
        running.done_s += running.rate / job.ranks * (now - running.at)
        running.at = now
        if running.done_s > running.furthest_s:
            running.furthest_s = running.done_s
            self.progressed_at = max(now, self.progressed_at)  # the last submission may be yet to come

    # -- moves between clusters ---------------------------------------------------------------------------------------

    def halt(self, name: str) -> None:
        """A job was told to stop, so that it can go on in another cluster."""
        running = self.jobs[name]
        self.advance(running)
        running.rate = 0
        running.durable_s = running.done_s
        stamp = self.stamp(running)
        self.at(self.now + self.costs.resize_s / 2, lambda: self.stopped(running, stamp))

    def depart(self, name: str) -> Running:
        """A job that has no devices leaves."""
        running = self.jobs.pop(name)
        self.stamp(running)
        self.left -= 1
        return running

    def arrive(self, running: Running) -> None:
        """A job comes from another cluster; the book has it already."""
        running.job = self.book.jobs[running.trace.id]
        self.jobs[running.trace.id] = running
        self.left += 1

    # -- what breaks ------------------------------------------------------------------------------------------------

    def go_back(self, running: Running, every_s: float) -> float:
        """It loses what it did since its newest checkpoint, one in `every_s`; returns seconds at full width."""
        ran = self.now - running.resumed_at
        since = min(ran % every_s * running.width / running.job.ranks, running.done_s - running.durable_s)
        lost = max(0.0, since)
        running.done_s -= lost
        running.out.restarts += 1
        running.out.lost_device_s += lost * running.job.ranks
        return lost

    def add_node(self, index: int) -> None:
        """A node is there, for the first time or again."""
        leased = index >= self.fleet.nodes - self.fleet.spot_nodes
        name = f"node-{index}"
        rack = f"rack-{index // self.fleet.nodes_per_rack}"
        until = float("inf") if leased else None
        self.book.add_node(name, POOL, rack, self.fleet.devices_per_node, self.now, until)
        if leased and self.failures.spot_lease_s:
            stay = self.rng.expovariate(1.0 / self.failures.spot_lease_s)
            self.at(self.now + max(0.0, stay - self.failures.spot_notice_s), lambda: self.notice(name))
            self.at(self.now + stay, lambda: self.lose_node(index, self.failures.spot_away_s))

    def notice(self, name: str) -> None:
        """A leased node says that it is about to go."""
        if name in self.book.nodes:
            self.book.drain(name)

    def next_failure(self) -> None:
        """One of the nodes fails at a random time."""
        if self.failures.node_mtbf_s:
            gap = self.rng.expovariate(self.fleet.nodes / self.failures.node_mtbf_s)
            self.at(self.now + gap, self.fail)

    def fail(self) -> None:
        """A random node fails."""
        self.lose_node(self.rng.randrange(self.fleet.nodes), self.failures.repair_s)
        self.next_failure()

    def lose_node(self, index: int, away_s: float) -> None:
        """A node is gone for some time; its jobs go back to their newest checkpoints."""
        name = f"node-{index}"
        if name not in self.book.nodes:
            return
        every = KILLED_CHECKPOINT_S if self.kind.kills else self.costs.checkpoint_every_s
        for job in self.book.nodes[name].jobs:
            self.advance(self.jobs[job.id])
        for job in self.book.remove_node(name, self.now):
            running = self.jobs[job.id]
            lost = self.go_back(running, every) if running.rate else 0.0
            running.rate = 0
            self.book.lost_work(job, lost, self.now)
            for meter in running.meters:
                meter.lose(lost * job.ranks, (LEASE_S + self.costs.resize_s) * job.ranks)
            stamp = self.stamp(running)
            self.at(self.now + LEASE_S, lambda running=running, stamp=stamp: self.stopped(running, stamp))
        self.policy.node_lost()
        self.at(self.now + away_s, lambda: self.add_node(index))


def _widths(trace: TraceJob) -> tuple[int, ...]:
    groups = trace.devices // trace.unit
    return tuple(trace.unit * width for width in range(1, groups + 1) if groups % width == 0)
