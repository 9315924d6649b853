"""No device is ever given twice, whatever is said in whatever order; and everything that can run does in the end.

The machine plays jobs, nodes and a person against the scheduler. Words travel both ways with any delay, are repeated,
and of the notices of one job any but the last may be lost. What a job really uses is kept apart from what the
scheduler believes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from model.control import AddressedDirective, InboxBatch, JobClosed, JobNotice, NodeNotice
from model.ids import DeviceId, Epoch, Generation, JobId, NodeId
from model.job_state import JobPhase
from model.orders import NodeOrder
from scheduling.ledger import apply, commit, fold
from scheduling.policy import decide
from scheduling.state import ClusterState
from tests.scheduling.builders import CPU as CLASS
from tests.scheduling.builders import T0, assert_exclusive, demand, device_ids

NODES = ("node-1", "node-2")
WIDTH = 2


@dataclass
class Job:
    """A job that keeps to the rules of design record 0002."""

    name: str
    ranks: int
    tier: str
    born: float
    run: str
    phase: JobPhase = JobPhase.QUEUED
    devices: tuple[DeviceId, ...] = ()
    epoch: int = 0
    number: int = 0
    held: bool = False
    move: tuple[str, str] | None = None
    seen: set[str] = field(default_factory=set)
    mail: deque[AddressedDirective] = field(default_factory=deque)
    target: tuple[DeviceId, ...] = ()

    def notice(self) -> JobNotice:
        self.number += 1
        waits = self.phase is JobPhase.QUEUED or (self.phase is JobPhase.SUSPENDED and not self.held)
        moves = self.phase is JobPhase.RUNNING and self.move is not None
        asked = self.move if moves else None
        return JobNotice(
            job=JobId(self.name),
            generation=Generation(1),
            number=self.number,
            workflow_run=self.run,
            demand=demand(self.name, self.ranks, self.tier, after=self.born),
            phase=self.phase,
            epoch=Epoch(self.epoch),
            devices=self.devices,
            wants="devices" if waits else "move" if moves else "nothing",
            held=self.held,
            move_to=asked[1] if asked else None,
            request=asked[0] if asked else "",
        )


class World:
    """A cluster, its jobs and its people."""

    def __init__(self) -> None:
        self.state = ClusterState("test")
        self.now = 0.0
        self.inbox: list[InboxBatch] = []
        self.live: dict[str, Job] = {}
        self.zombies: list[Job] = []
        self.incarnation: dict[str, int] = {}
        self.lost: set[str] = set()
        self.count = 0
        for name in NODES:
            self.incarnation[name] = 1
            self.say_node(name)

    # -- what the world does --

    def say(self, *items) -> None:
        self.inbox.append(
            InboxBatch(
                tuple(item for item in items if isinstance(item, JobNotice)),
                tuple(item for item in items if isinstance(item, NodeNotice)),
                tuple(item for item in items if isinstance(item, JobClosed)),
                tuple(item for item in items if isinstance(item, NodeOrder)),
            )
        )

    def node(self, name: str) -> NodeId:
        return NodeId(name, self.incarnation[name])

    def say_node(self, name: str) -> None:
        node = self.node(name)
        self.lost.discard(name)
        parts = tuple(
            (JobId(job.name), Epoch(job.epoch))
            for job in [*self.live.values(), *self.zombies]
            if any(device.node == node for device in job.devices)
        )
        devices = tuple((device, "cpu") for device in device_ids(str(node), WIDTH))
        self.say(NodeNotice(node, True, devices, CLASS, parts))

    def submit(self, ranks, tier):
        self.count += 1
        name = f"job-{self.count}"
        job = self.live[name] = Job(name, ranks, tier, self.now, f"run-{self.count}")
        self.say(job.notice())
        return name

    def hear(self, name):
        """The job takes the next directive."""
        job = self.live.get(name)
        if job is None or not job.mail:
            return
        item = job.mail.popleft()
        directive = item.directive
        if directive.decision in job.seen:
            return
        job.seen.add(directive.decision)
        waits = job.phase is JobPhase.QUEUED or (job.phase is JobPhase.SUSPENDED and not job.held)
        match directive.action:
            case "place" if waits and directive.notice == job.number:
                job.devices, job.phase, job.epoch = directive.devices, JobPhase.STARTING, job.epoch + 1
                self.say(job.notice())
            case "preempt" if job.phase in (JobPhase.STARTING, JobPhase.RUNNING):
                job.phase = JobPhase.SUSPENDING
                self.say(job.notice())
            case "migrate" if job.phase is JobPhase.RUNNING and job.move and job.move[0] == directive.request:
                # Both places are in use while it moves.
                job.phase, job.target = JobPhase.MOVING, directive.devices
                self.say(job.notice())
            case "refuse" if job.move and job.move[0] == directive.request:
                job.move = None
                self.say(job.notice())
            case "lost" if any(device.node in directive.nodes for device in job.devices):
                job.devices, job.phase, job.move = (), JobPhase.QUEUED, None
                self.say(job.notice())
            case "wait" if directive.request:
                self.say(job.notice())
            case _:
                pass

    def advance(self, name, fails):
        """What is under way comes to its end."""
        job = self.live.get(name)
        if job is None:
            return
        match job.phase:
            case JobPhase.STARTING if fails:
                job.devices, job.phase = (), JobPhase.QUEUED
            case JobPhase.STARTING:
                job.phase = JobPhase.RUNNING
            case JobPhase.SUSPENDING if fails and not job.held:
                job.phase = JobPhase.RUNNING
            case JobPhase.SUSPENDING:
                job.devices, job.phase = (), JobPhase.SUSPENDED
            case JobPhase.MOVING if fails:
                job.phase, job.move = JobPhase.RUNNING, None
            case JobPhase.MOVING:
                job.phase, job.move, job.devices, job.epoch = JobPhase.RUNNING, None, job.target, job.epoch + 1
            case _:
                return
        self.say(job.notice())

    def end(self, name):
        job = self.live.get(name)
        if job is not None and job.phase is JobPhase.RUNNING:
            job.phase, job.devices = JobPhase.COMPLETED, ()
            self.say(job.notice())
            self.live.pop(name)

    def hold_or_resume(self, name):
        job = self.live.get(name)
        if job is None or job.phase in (JobPhase.STARTING, JobPhase.MOVING):
            return
        job.held = not job.held
        if job.held and job.phase is JobPhase.RUNNING:
            job.phase, job.move = JobPhase.SUSPENDING, None
        elif job.held and job.phase is JobPhase.QUEUED:
            job.phase = JobPhase.SUSPENDED
        self.say(job.notice())

    def change_ones_mind(self, name):
        job = self.live.get(name)
        if job is not None and job.phase in (JobPhase.QUEUED, JobPhase.SUSPENDED) and not job.held:
            self.hold_or_resume(name)
            self.hold_or_resume(name)

    def ask_to_move(self, name, to):
        job = self.live.get(name)
        if job is not None and job.phase is JobPhase.RUNNING:
            self.count += 1
            job.move = (f"request-{self.count}", to)
            self.say(job.notice())

    def terminate(self, name):
        """Its processes stay until the node notices."""
        job = self.live.pop(name, None)
        if job is not None:
            self.zombies.append(job)
            self.say(JobClosed(JobId(name), job.run, "terminated"))

    def nodes_notice(self):
        self.zombies.clear()
        for name in NODES:
            self.say_node(name)

    def lose_node(self, name, back):
        """Its lease and a margin are over: nothing of it counts any more."""
        node = self.node(name)
        self.say(NodeNotice(node, False, (), CLASS))
        self.incarnation[name] += 1
        self.lost.add(name)
        if back:
            self.say_node(name)

    def operate(self, name, order):
        """An operator cordons a node, drains it, or uses it again."""
        self.say(NodeOrder(name, order))

    def repeat(self, index):
        """A batch that is told again."""
        if self.inbox:
            batch = self.inbox[index % len(self.inbox)]
            # Nodes are told by one observer, in order.
            self.inbox.append(InboxBatch(batch.jobs, (), batch.closed))

    def tick(self, seconds, keep):
        """Keeps back the last batch sometimes: it has been sent, but has not come."""
        self.now += seconds
        if seconds > 3:
            for name in NODES:
                self.say_node(name)
        late = self.inbox[-1:] if keep else []
        batches = self.inbox[: len(self.inbox) - len(late)]
        self.inbox = late
        self._tick(batches)

    def _tick(self, batches) -> None:
        now = T0 + timedelta(seconds=self.now)
        base = apply(self.state, batches, now)
        assert apply(self.state, [fold(batches)], now).to_json() == base.to_json()
        plan = decide(base, now)
        again = decide(ClusterState.from_json(base.to_json()), now)
        assert again == plan, "equal states give equal plans"
        done = commit(base, plan, now)
        self.state = done.state
        assert ClusterState.from_json(self.state.to_json()) == self.state
        for item in done.directives:
            assert item.directive.reason.endswith("."), item.directive.reason
            cordoned = {device.node.name for device in item.directive.devices} & set(dict(base.cordoned))
            again = base.job(item.job).told is not None
            assert again or not cordoned, f"{item.directive} on {cordoned}"
            job = self.live.get(item.job)
            if job is not None:
                job.mail.append(item)
        for job in self.state.jobs:
            waits = job.notice.wants == "devices" and not job.notice.held and job.told is None
            assert not waits or dict(plan.waiting).get(job.notice.job), f"{job.notice.job} waits without a reason"

    # -- what must hold --

    def no_device_is_used_twice(self):
        current = {self.node(name) for name in NODES if name not in self.lost}
        users: dict[DeviceId, str] = {}
        for job in [*self.live.values(), *self.zombies]:
            moving = job.target if job.phase is JobPhase.MOVING else ()
            for device in dict.fromkeys((*job.devices, *moving)):
                if device.node in current:
                    assert users.setdefault(device, job.run) == job.run, f"{device}: {users[device]} and {job.run}"

    def no_device_is_promised_twice(self):
        assert_exclusive(self.state)

    def come_to_rest(self) -> None:
        """Everything that can run does in the end: no hold, claim or directive is left over."""
        self.nodes_notice()
        for name in NODES:
            self.operate(name, "uncordon")
        for job in self.live.values():
            if job.held:
                job.held = False
                self.say(job.notice())
        for _ in range(60 * (len(self.live) + 1)):
            self.now += 31
            batches, self.inbox = self.inbox, []
            self._tick(batches)
            self.no_device_is_used_twice()
            for name, job in list(self.live.items()):
                while job.mail:
                    self.hear(name)
                self.advance(name, False)
                if job.phase is JobPhase.RUNNING and not job.mail:
                    self.end(name)
            self.nodes_notice()
            if not any(job.ranks <= WIDTH * len(NODES) for job in self.live.values()):
                break
        left = [job for job in self.live.values() if job.ranks <= WIDTH * len(NODES)]
        assert not left, [(job, self.state.job(JobId(job.name))) for job in left]


# What happens how often: much is heard and done between two surprises.
OFTEN = {
    "tick": 30,
    "hear": 30,
    "advance": 25,
    "submit": 8,
    "end": 4,
    "hold_or_resume": 3,
    "change_ones_mind": 3,
    "ask_to_move": 4,
    "terminate": 2,
    "nodes_notice": 3,
    "lose_node": 1,
    "operate": 2,
    "repeat": 2,
}


def play(random: Random, steps: int) -> World:
    world = World()
    for what in random.choices(list(OFTEN), list(OFTEN.values()), k=steps):
        name = random.choice(list(world.live)) if world.live else "nobody"
        match what:
            case "tick":
                world.tick(random.choice([0.0, 0.5, 3.0, 6.0, 6.0, 31.0, 130.0]), random.random() < 0.3)
            case "submit":
                if len(world.live) < 8:
                    world.submit(random.randint(1, 5), random.choice(["premium", "standard", "basic"]))
            case "advance":
                world.advance(name, random.random() < 0.2)
            case "ask_to_move":
                world.ask_to_move(name, random.choice([*NODES, *NODES, "nowhere"]))
            case "nodes_notice":
                world.nodes_notice()
            case "lose_node":
                world.lose_node(random.choice(NODES), random.random() < 0.7)
            case "operate":
                world.operate(random.choice(NODES), random.choice(["cordon", "drain", "uncordon", "uncordon"]))
            case "repeat":
                world.repeat(random.randint(0, 5))
            case _:
                getattr(world, what)(name)
        world.no_device_is_used_twice()
        world.no_device_is_promised_twice()
    return world


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_no_device_is_given_twice_and_everything_ends(seed):
    play(Random(seed), 150).come_to_rest()
