"""`ergo sla report`: the scheduler's accounts, and the same from nothing but the events of jobs and decisions."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from cli.fleet.sla import services, services_of_events
from events.consumer import Once
from events.envelope import from_json, to_json
from events.types import DecisionData, DecisionMade, Event, JobPhaseChanged, JobPhaseChangedData, PlacementData
from model.control import Directive, JobNotice
from model.ids import DeviceId, Epoch, EventId, Generation, JobId, Sequence, Step, TenantId
from model.job_spec import Tier
from model.job_state import JobPhase
from scheduling.accounts import Admitted, Heard, rebuilt
from tests.scheduling.builders import T0, Cluster, demand, node


@dataclass
class Life:
    """A job that tells the scheduler and the world what its workflow would; every event may be told twice."""

    name: str
    ranks: int
    tier: str
    submitted: datetime
    phase: JobPhase = JobPhase.QUEUED
    held: bool = False
    epoch: int = 0
    devices: tuple[DeviceId, ...] = ()
    delivered_ms: int = 0
    since: datetime = T0
    number: int = 0
    admitted_at: datetime | None = None
    events: list[Event] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.since = self.submitted
        self._tell(None)

    def become(self, phase: JobPhase, now: datetime, *, devices=None, held=None, checkpoint: datetime | None = None):
        """Enters a phase. `checkpoint`: it lost what it did since then."""
        before = self.phase
        if before is JobPhase.RUNNING:
            end = now if checkpoint is None else max(self.since, checkpoint)
            self.delivered_ms += round(1000 * (end - self.since).total_seconds()) * len(self.devices)
        self.phase, self.since = phase, now
        self.devices = self.devices if devices is None else devices
        self.held = self.held if held is None else held
        self.epoch += phase is JobPhase.STARTING
        self._tell(None if before is phase else before)

    def notice(self) -> JobNotice:
        self.number += 1
        waits = self.phase in (JobPhase.QUEUED, JobPhase.SUSPENDED) and not self.held
        return JobNotice(
            JobId(self.name), Generation(1), self.number, f"run-{self.name}",
            demand(self.name, self.ranks, self.tier, after=(self.submitted - T0).total_seconds()),
            self.phase, Epoch(self.epoch), self.devices, "devices" if waits else "nothing", self.held,
            since=self.since, delivered_ms=self.delivered_ms,
        )  # fmt: skip

    def hear(self, directive: Directive, now: datetime) -> None:
        if directive.admitted_at not in (None, self.admitted_at):
            self.admitted_at = directive.admitted_at
            data = DecisionData(
                action="admit",
                reason="Promised.",
                policy=directive.policy,
                state_digest=directive.state_digest,
                admitted_at=directive.admitted_at,
            )
            self._event(DecisionMade, data, now)

    def _tell(self, before: JobPhase | None) -> None:
        placed = PlacementData(devices=self.devices, device_of_rank=(0,)) if self.devices else None
        data = JobPhaseChangedData(
            before=before,
            after=self.phase,
            reason="It is so.",
            step=Step(0),
            placement=placed,
            tier=Tier(self.tier),
            width=self.ranks,
            held=self.held,
            delivered_ms=self.delivered_ms,
        )
        self._event(JobPhaseChanged, data, self.since)

    def _event(self, shape, data, time: datetime) -> None:
        seq = Sequence(len(self.events) + 1)
        made = shape(
            id=EventId(JobId(self.name), f"run-{self.name}", Generation(1), seq),
            source="/clusters/test",
            subject=JobId(self.name),
            tenant=TenantId("default"),
            epoch=Epoch(self.epoch),
            time=time,
            data=data,
        )
        self.events.append(from_json(to_json(made)))  # as it comes from Kafka


class World:
    """A scheduler of two nodes, and jobs that obey slowly; what they say comes late, twice, or with the next word."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cluster = Cluster(node("node-1", 4), node("node-2", 4))
        self.jobs: dict[str, Life] = {}
        self.mail: list[tuple[datetime, JobNotice]] = []
        self.orders: list[tuple[datetime, str, Directive]] = []

    @property
    def now(self) -> datetime:
        return self.cluster.now

    def step(self, seconds: float) -> None:
        """Passes time: what has come until then is told in one tick."""
        until = self.now + timedelta(seconds=seconds)
        while self.orders and self.orders[0][0] <= until:
            at, name, directive = self.orders.pop(0)
            self._obey(at, self.jobs[name], directive)
            self.orders.sort(key=lambda item: item[0])
        come = [notice for at, notice in self.mail if at <= until]
        self.mail = [(at, notice) for at, notice in self.mail if at > until]
        if self.rng.random() < 0.3:
            come += come[:2]
        for name, item in self.cluster.tell(*come, after=seconds).items():
            life = self.jobs[name]
            life.hear(item.directive, self.now)
            if item.directive.decision not in life.seen:
                life.seen.add(item.directive.decision)
                self._later(name, item.directive, self.rng.uniform(0.1, 2.0))

    def change(self, name: str, phase: JobPhase, at: datetime, **fields) -> None:
        life = self.jobs[name]
        life.become(phase, at, **fields)
        self.mail = [(due, notice) for due, notice in self.mail if notice.job != name or self.rng.random() < 0.5]
        self.mail.append((at + timedelta(seconds=self.rng.uniform(0.0, 3.0)), life.notice()))

    def submit(self, ranks: int, tier: str) -> None:
        name = f"job-{len(self.jobs)}"
        life = self.jobs[name] = Life(name, ranks, tier, self.now)
        self.mail.append((self.now, life.notice()))

    def _later(self, name: str, directive: Directive, seconds: float) -> None:
        self.orders.append((self.now + timedelta(seconds=seconds), name, directive))
        self.orders.sort(key=lambda item: item[0])

    def _obey(self, at: datetime, life: Life, directive: Directive) -> None:
        idle = life.phase in (JobPhase.QUEUED, JobPhase.SUSPENDED) and not life.held
        if directive.action == "place" and idle and directive.notice == life.number:
            self.change(life.name, JobPhase.STARTING, at, devices=directive.devices)
            self.change(life.name, JobPhase.RUNNING, at + timedelta(seconds=4))
        elif directive.action == "preempt" and life.phase is JobPhase.RUNNING and at >= life.since:
            self.change(life.name, JobPhase.SUSPENDING, at)
            self.change(life.name, JobPhase.SUSPENDED, at + timedelta(seconds=2), devices=())
        elif directive.action in ("place", "preempt") and life.number:
            self.mail.append((at, life.notice()))

    def act(self) -> None:
        """Something that a person does or that breaks."""
        now, rng = self.now, self.rng
        if len(self.jobs) < 12:
            self.submit(rng.choice((1, 2, 4)), rng.choice(("premium", "standard", "basic")))
        life = rng.choice(list(self.jobs.values()))
        if life.phase.ended or life.since > now:
            return
        what = rng.choice(
            (
                "hold",
                "resume",
                "resume",
                "lose",
                "nothing",
                "nothing",
                "nothing",
                "end" if rng.random() < 0.3 else "nothing",
            )
        )
        if what == "hold" and not life.held and life.phase in (JobPhase.QUEUED, JobPhase.SUSPENDED):
            self.change(life.name, JobPhase.SUSPENDED, now, held=True)
        elif what == "hold" and life.phase is JobPhase.RUNNING:
            self.change(life.name, JobPhase.SUSPENDING, now)
            self.change(life.name, JobPhase.SUSPENDED, now + timedelta(seconds=2), devices=(), held=True)
        elif what == "resume" and life.held and life.phase is JobPhase.SUSPENDED:
            self.change(life.name, JobPhase.QUEUED, now, held=False)
        elif what == "lose" and life.phase is JobPhase.RUNNING:
            self.change(life.name, JobPhase.QUEUED, now, devices=(), checkpoint=now - timedelta(seconds=400))
        elif what == "end" and life.phase is JobPhase.RUNNING:
            self.change(life.name, JobPhase.COMPLETED, now, devices=())

    def events(self) -> list[Event]:
        """Of all jobs in the order of partitions, some told twice, as a reader lets them pass."""
        told = [event for life in self.jobs.values() for event in (*life.events, *life.events[-2:])]
        once = Once()
        return [event for event in told if once.admit(event)]


@pytest.mark.parametrize("seed", range(3))
def test_the_report_is_the_same_from_the_events_alone(seed: int):
    world = World(seed)
    for _ in range(160):
        world.act()
        world.step(world.rng.uniform(1.0, 400.0))
    for _ in range(3):  # what is on its way arrives
        world.step(10.0)
    now = world.now
    live = services(world.cluster.state, now)
    rebuilt, left_out = services_of_events(world.events(), now)
    assert left_out == 0
    key = [(row.tenant, row.tier, row.jobs, row.hours, row.below) for row in live]
    assert [(row.tenant, row.tier, row.jobs, row.hours, row.below) for row in rebuilt] == key
    assert [row.served_s for row in rebuilt] == pytest.approx([row.served_s for row in live], abs=0.05)
    assert sum(row.hours for row in live) >= 10 and sum(row.below for row in live) > 0, "the world is no idle one"


def test_events_of_a_build_that_did_not_tell_what_was_asked_for_are_left_out_and_counted():
    life = Life("gpt", 2, "premium", T0)
    old = life.events[0].model_copy(update={"data": life.events[0].data.model_copy(update={"tier": None})})
    assert services_of_events([old], datetime.now(UTC)) == ([], 1)


def test_hours_are_judged_by_what_was_asked_for_in_them():
    """One device of four for two hours, then one of one, which is what a person has resized the job to."""
    hour = 3600.0
    words = [Heard(0.0, 0, 0.0, width=4), Admitted(0.0), Heard(0.0, 1, 0.0, width=4)]
    given = rebuilt(TenantId("default"), Tier.STANDARD, words, 2 * hour)
    assert (given.hours, given.below) == (2, 2)
    words.append(Heard(2 * hour + 1, 1, 2 * hour + 1, width=1))
    given = rebuilt(TenantId("default"), Tier.STANDARD, words, 4 * hour + 1)
    assert (given.hours, given.below) == (4, 2)


def test_what_is_lost_with_a_node_is_charged_to_us():
    """The scheduler counted 400 s more than the job had to show after its node was gone."""
    world = World(0)
    world.submit(4, "premium")
    for _ in range(3):
        world.step(5.0)
    life = world.jobs["job-0"]
    assert life.phase is JobPhase.RUNNING
    world.step(1000.0)
    begun = life.since
    before = services(world.cluster.state, world.now)[0].served_s
    assert before == pytest.approx(4 * (world.now - begun).total_seconds(), abs=0.01)
    world.change("job-0", JobPhase.QUEUED, world.now, devices=(), checkpoint=world.now - timedelta(seconds=400))
    world.step(5.0)
    account = world.cluster.job("job-0").account
    assert account is not None and account.delivered == pytest.approx(before - 1600, abs=0.01)
    row = services(world.cluster.state, world.now)[0]
    assert row.served_s == pytest.approx(before - 1600, abs=0.01)
