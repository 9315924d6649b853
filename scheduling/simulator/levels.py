"""Lets regions and a fleet move jobs between simulated clusters, by the functions of `scheduling.hierarchy`.

Each cluster is a run of the engine with its own book and policy. Levels speak with them in rounds: what a level says
comes at once, what it is answered it hears in its next round. A level that is away says and hears nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from scheduling.core.settings import Settings
from scheduling.hierarchy.member import Answer, Desk, Order
from scheduling.hierarchy.movement import FLEET as BETWEEN_REGIONS
from scheduling.hierarchy.movement import LevelState, MovementSettings, decide
from scheduling.hierarchy.routing import Routes, route
from scheduling.hierarchy.summary import Summary, merge, ripe, summarise
from scheduling.simulator.clusters import Cluster, Clusters
from scheduling.simulator.engine import SAMPLE_S, Run, Running
from scheduling.simulator.outcome import ClusterMove, LevelRecord, Outcome
from scheduling.simulator.policies import FLEET, MOVING
from scheduling.simulator.workload import Costs, Failures, TraceJob

REGION_EVERY_S, FLEET_EVERY_S = 30.0, 60.0
_IDLE_S = 86_400.0
_NEVER = (float("inf"), float("inf"))


@dataclass(slots=True)
class _Departed:
    """A job that a cluster has given up and no other has yet."""

    running: Running
    origin: str
    left_s: float
    stopped: bool


class Member:
    """A cluster as levels see it."""

    def __init__(self, shape: Cluster, run: Run, world: World) -> None:
        self.name, self.region, self.run, self.world = shape.name, shape.region, run, world
        self.desk = Desk(run.book)
        self.halted: set[str] = set()
        """Jobs that were told to stop for a level, and have not left yet."""

    def summary(self, now: float) -> Summary:
        """What it tells."""
        return summarise(self.run.book, self.name, now)

    def answer(self, order: Order, now: float) -> Answer:
        """Does what it is told, and lets the world follow its book."""
        name, desk, run = order.ask.id, self.desk, self.run
        here, leaving = name in run.jobs, name in desk.leaving
        answer = desk.answer(order, now)
        if name in desk.leaving and not leaving:
            run.halt(name)
            self.halted.add(name)
        there = name in run.book.jobs
        if here and not there:
            self.world.departed[name] = _Departed(run.depart(name), self.name, now, name in self.halted)
            self.halted.discard(name)
        elif there and not here:
            self.world.adopt(name, order.level, self)
        run.wake = now
        return answer

    def go_on(self, now: float) -> None:
        """Jobs that were stopped for a level that has fallen silent go on here."""
        if self.desk.leaving:
            self.desk.let_go(now)
            self.halted &= set(self.desk.leaving)
            self.run.wake = now


class Level:
    """A region or the fleet: its state, and what it was answered since its last round."""

    def __init__(self, name: str, settings: MovementSettings, every_s: float, world: World) -> None:
        self.state = LevelState(name=name)
        self.settings, self.every_s = settings, every_s
        self.answers: list[Answer] = []
        self.due_s = every_s
        self._outages = world.clusters.lost(name, world.seed)
        self._outage = next(self._outages, _NEVER)
        self.record = world.out.levels[name] = LevelRecord()

    def is_there(self, now: float) -> bool:
        """Whether it is not lost just now."""
        while self._outage[1] <= now:
            self._outage = next(self._outages, _NEVER)
        return self._outage[0] > now

    def miss(self) -> None:
        """It is lost for a round, and with it what it was answered."""
        self.answers.clear()
        self.record.away_s += self.every_s

    def round(self, members: Sequence[Summary], now: float) -> tuple[Order, ...]:
        """What it says now."""
        answers, self.answers = self.answers, []
        self.state, orders = decide(self.state, members, answers, now, self.settings)
        return orders

    def hear(self, order: Order, answer: Answer) -> None:
        """It is answered."""
        if order.kind == "bid":
            self.record.bids += 1
            self.record.refused += not answer.yes
        self.answers.append(answer)


class Region(Level):
    """A region: it moves jobs between its clusters, and passes on what the fleet says."""

    def __init__(self, name: str, members: Sequence[Member], settings: MovementSettings, world: World) -> None:
        super().__init__(name, settings, REGION_EVERY_S, world)
        self.members = {member.name: member for member in members}
        self.routes = Routes()

    def summaries(self, now: float) -> list[Summary]:
        """What its clusters tell."""
        return [member.summary(now) for member in self.members.values()]

    def ripe(self, now: float, settings: MovementSettings) -> bool:
        """Whether it has a job that has waited for so long."""
        books = (member.run.book for member in self.members.values())
        return any(ripe(book, now, settings.waits_s, settings.narrow_s) for book in books)

    def move(self, now: float) -> None:
        """A round of its own."""
        if not self.state.moves and not self.ripe(now, self.settings):
            return  # nothing would come of it
        for order in self.round(self.summaries(now), now):
            self.hear(order, self.members[order.member].answer(order, now))

    def pass_on(self, order: Order, now: float) -> Answer:
        """Asks one of its clusters for the fleet."""
        self.routes, cluster = route(self.routes, order, self.summaries(now))
        return Answer(order.number, False) if cluster is None else self.members[cluster].answer(order, now)


class World:
    """All clusters and levels; between two rounds of levels each cluster is on its own."""

    def __init__(
        self,
        jobs: Sequence[Sequence[TraceJob]],
        clusters: Clusters,
        policy: str,
        costs: Costs,
        failures: Failures,
        seed: int,
        progress: Callable[[int], None] | None,
        settings: Settings | None,
    ) -> None:
        alone = "ours" if policy in MOVING else policy
        self.clusters, self.seed, self.costs = clusters, seed, costs
        self.out = Outcome(policy, clusters=tuple(one.name for one in clusters.members))
        self.now = 0.0
        self.departed: dict[str, _Departed] = {}
        self.members: list[Member] = []
        for shape, submitted in zip(clusters.members, jobs, strict=True):
            own = f"{seed}/{shape.name}"
            run = Run(submitted, shape.fleet, alone, costs, failures, own, progress, settings, shape.name)
            self.members.append(Member(shape, run, self))
        between = replace(MovementSettings(), pause_s=costs.resize_s + costs.between_clusters_s)
        far = replace(BETWEEN_REGIONS, pause_s=costs.resize_s + costs.between_regions_s)
        self.regions: list[Region] = []
        self.fleet: Level | None = None
        if policy in MOVING:
            for name in clusters.regions:
                own_members = [member for member in self.members if member.region == name]
                self.regions.append(Region(name, own_members, between, self))
        if policy == FLEET and len(self.regions) > 1:
            self.fleet = Level(FLEET, far, FLEET_EVERY_S, self)

    @property
    def left(self) -> int:
        """How many jobs have not ended."""
        return sum(member.run.left for member in self.members) + len(self.departed)

    def run(self, observe: Callable[[World], None] | None = None) -> Outcome:
        """Until every job has ended. `observe` sees the world after each round."""
        begun, step = time.process_time(), REGION_EVERY_S if self.regions else SAMPLE_S
        happened = sampled = 0.0
        while self.left:
            self.now += step
            for run in (member.run for member in self.members):
                while run.due() <= self.now:
                    run.step(run.due())
                run.pass_by(self.now)
                if run.events:
                    happened = self.now
            self.round()
            if observe is not None:
                observe(self)
            if self.now - sampled >= SAMPLE_S:
                sampled = self.now
                self.sample()
            if self.now - happened > _IDLE_S or all(member.run.stuck() for member in self.members):
                break  # nobody is left who could make room for those that wait, or failures undo all that is done
        return self.close(time.process_time() - begun)

    def round(self) -> None:
        """Levels say what they have to say; the fleet after its regions, which pass on what it says."""
        for member in self.members:
            member.go_on(self.now)
        for region in self.regions:
            if region.is_there(self.now):
                region.move(self.now)
            else:
                region.miss()
        fleet = self.fleet
        if fleet is None or self.now < fleet.due_s:
            return
        fleet.due_s = self.now + fleet.every_s
        if not fleet.is_there(self.now):
            fleet.miss()
            return
        up = {region.state.name: region for region in self.regions if region.is_there(self.now)}
        if fleet.state.moves or any(region.ripe(self.now, fleet.settings) for region in up.values()):
            told = [merge(name, region.summaries(self.now), self.now) for name, region in up.items()]
            for order in fleet.round(told, self.now):
                region = up.get(order.member.partition("/")[0])
                if region is not None:
                    fleet.hear(order, region.pass_on(order, self.now))

    def adopt(self, name: str, level: str, member: Member) -> None:
        """A job that was on its way is in a cluster."""
        one = self.departed.pop(name)
        ran = one.running.out.started_s is not None
        if ran:
            far = level == FLEET
            takes = self.costs.between_regions_s if far else self.costs.between_clusters_s
            one.running.there_at = one.left_s + takes
        member.run.arrive(one.running)
        self.out.moves.append(
            ClusterMove(name, level, one.origin, member.name, one.left_s, self.now, ran, one.stopped)
        )  # fmt: skip

    def sample(self) -> None:
        """Keeps how much is used and how many wait."""
        runs = [member.run for member in self.members]
        healthy = sum(run.devices for run in runs)
        used = sum(min(run.allocated, run.devices) for run in runs)
        waiting = sum(run.book.waiting.count for run in runs) + len(self.departed)
        self.out.samples.append((self.now, used, healthy, waiting))

    def close(self, cpu_s: float) -> Outcome:
        """The sums over all clusters."""
        out, parts = self.out, [member.run.close() for member in self.members]
        out.jobs = sorted(chain.from_iterable(part.jobs for part in parts), key=lambda job: (job.submit_s, job.id))
        for part in parts:
            out.busy_device_s += part.busy_device_s
            out.healthy_device_s += part.healthy_device_s
            out.asked_busy_s += part.asked_busy_s
            out.asked_healthy_s += part.asked_healthy_s
            out.decisions += part.decisions
            out.decision_us += part.decision_us
            out.policy_cpu_s += part.policy_cpu_s
            out.reasons.update(part.reasons)
        out.reasons.update(dict.fromkeys(self.departed, "It is on its way to another cluster."))
        out.span_s = max((job.ended_s or 0.0 for job in out.jobs), default=0.0) if not self.left else self.now
        out.cpu_s = cpu_s
        return out


def simulate_clusters(
    jobs: Sequence[TraceJob],
    homes: Sequence[int],
    clusters: Clusters,
    policy: str,
    *,
    costs: Costs | None = None,
    failures: Failures | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    settings: Settings | None = None,
) -> Outcome:
    """Runs a trace on several clusters to its end. Every job must have a tier, and fit the cluster of its home.

    Raises:
        KeyError: no such policy.
    """
    parts: list[list[TraceJob]] = [[] for _ in clusters.members]
    for job, home in zip(jobs, homes, strict=True):
        parts[home].append(job)
    world = World(parts, clusters, policy, costs or Costs(), failures or Failures(), seed, progress, settings)
    return world.run()
