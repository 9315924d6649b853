"""What came of a simulated run: raw, so that every report is made of the same figures."""

from __future__ import annotations

from dataclasses import dataclass, field

from model.job_spec import Tier


@dataclass(slots=True)
class JobOutcome:
    """A job's life. Times in seconds after the trace's beginning; None: it did not come to that.

    Attributes:
        admitted_s: when its level began to be promised.
        started_s: its first delivered second.
        asked_s: its duration at full width.
        preemptions: how often it lost all its devices to another job.
        restarts: how often it went back to a checkpoint, because a node failed or a policy killed it.
        hours: job-hours from admission; `below` of these missed the level of its tier, `excused` of them because of a
            failure that alone cost more than the level leaves.
        hours_since_submission: the same hours counted from submission, with `below_since_submission`, which judges a
            last part by its own length.
    """

    id: str
    tier: Tier
    tenant: str
    devices: int
    submit_s: float
    asked_s: float
    admitted_s: float | None = None
    started_s: float | None = None
    ended_s: float | None = None
    preemptions: int = 0
    resizes: int = 0
    moves: int = 0
    restarts: int = 0
    lost_device_s: float = 0.0
    hours: int = 0
    below: int = 0
    excused: int = 0
    hours_since_submission: int = 0
    below_since_submission: int = 0
    short_below: int = 0
    """Last parts of hours from admission that missed the level by their own length, though not by what an hour allows;
    they are not in `below`. See `meter.Meter`."""
    home: str = ""
    """The cluster to which it was submitted."""

    @property
    def completion_s(self) -> float | None:
        """From submission to the end."""
        return None if self.ended_s is None else self.ended_s - self.submit_s


@dataclass(frozen=True, slots=True)
class ClusterMove:
    """A job that went on in another cluster.

    Attributes:
        level: who moved it.
        left_s: when it was given up; `came_s` when the other cluster had it.
        ran: it had run before, so that its checkpoint came along; `running`: it was stopped for this.
    """

    job: str
    level: str
    origin: str
    target: str
    left_s: float
    came_s: float
    ran: bool
    running: bool


@dataclass(slots=True)
class LevelRecord:
    """A level's questions whether a job would start somewhere, how many were answered no, and how long it was lost."""

    bids: int = 0
    refused: int = 0
    away_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """A run of one policy on one trace.

    Attributes:
        samples: (time s, devices given to jobs, devices of healthy nodes, jobs waiting), in time order, one a simulated
            ten minutes.
        busy_device_s: device-seconds that were given to jobs; `healthy_device_s` those that healthy nodes had.
        decisions: how many decisions were made; `decision_us` their times in microseconds, one for each round that
            decided something, divided by its decisions.
        cpu_s: processor time of the whole run; `policy_cpu_s` that of the policy's rounds, as `decision_us`.
        reasons: for the jobs still waiting at the end, what for.
    """

    policy: str
    jobs: list[JobOutcome] = field(default_factory=list[JobOutcome])
    samples: list[tuple[float, int, int, int]] = field(default_factory=list[tuple[float, int, int, int]])
    busy_device_s: float = 0.0
    healthy_device_s: float = 0.0
    decisions: int = 0
    decision_us: list[float] = field(default_factory=list[float])
    span_s: float = 0.0
    cpu_s: float = 0.0
    policy_cpu_s: float = 0.0
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    clusters: tuple[str, ...] = ()
    """Their names, where there are several; `moves` between them; `levels` above them by name."""
    levels: dict[str, LevelRecord] = field(default_factory=dict[str, LevelRecord])
    moves: list[ClusterMove] = field(default_factory=list[ClusterMove])
    asked_busy_s: float = 0.0
    """Device-seconds given to jobs while another job waited; of `asked_healthy_s` that healthy nodes had then."""
    asked_healthy_s: float = 0.0
