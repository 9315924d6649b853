"""Compares what the ledger believes with what nodes say of their parts: on every tick, by what nodes have told last.

Nothing is decided here. What does not fit for a while is kept in the state with its sentence, so that the log and
`ergo explain` show it, and the job that it is about is asked how it stands. A node's word that comes late or twice says
nothing new; one that is missing is a finding of its own when other nodes do tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

from model.ids import Epoch, JobId, NodeId
from model.job_state import JobPhase
from scheduling.state import ClusterState, Finding, JobState, NodeState, PartState

GRACE_S = 30.0
"""A finding counts when it has held for so long: a node writes its record every 2 s, and jobs tell in their time."""

SILENT_S = 180.0
"""A live node is told of every 60 s, see `infra.node_watch.SAY_AGAIN_S`."""

TOLERANCE, TOLERANCE_S = 0.1, 30.0
"""What a node has delivered may differ from what is counted by this share, or by so many seconds of the job's devices
there: live checkpoints stop it for a moment, and the two look at different times."""

ASK_S = 60.0
"""A job that a finding is about is asked again after so long."""


def reconciled(state: ClusterState, now: datetime) -> ClusterState:
    """The state with its findings of now; jobs whose findings have just come to count are asked."""
    before = {(item.kind, item.job, item.node): item for item in state.findings}
    found: list[Finding] = []
    ask = list(state.ask)
    for finding in _findings(state, now):
        known = before.get((finding.kind, finding.job, finding.node))
        made = finding
        if known is not None:
            counts = (now - known.since).total_seconds() >= GRACE_S
            made = replace(finding, since=known.since, counts=counts, asked_at=known.asked_at)
            due = made.asked_at is None or (now - made.asked_at).total_seconds() >= ASK_S
            if counts and due and made.kind in ("missing", "leftover"):
                made = replace(made, asked_at=now)
                if (job := JobId(made.job)) not in ask:
                    ask.append(job)
        found.append(made)
    found.sort(key=lambda item: (item.kind, item.job, item.node))
    return replace(state, findings=tuple(found), ask=tuple(ask))


def heard_part(
    known: PartState | None, job: JobId, epoch: Epoch, device_ms: int | None, now: datetime, since: datetime | None
) -> PartState:
    """A part as its node has just told it. The first word since the job runs as it does is what others count from."""
    if known is None or known.epoch != epoch:
        return PartState(job, epoch, device_ms, now, device_ms, now)
    if device_ms is None or (known.device_ms is not None and device_ms < known.device_ms):
        return known  # late
    if since is not None and known.base_at < since:
        return PartState(job, epoch, device_ms, now, device_ms, now)
    return replace(known, device_ms=device_ms, at=now)


def _findings(state: ClusterState, now: datetime) -> Iterator[Finding]:
    jobs = {job.notice.job: job for job in state.jobs}
    gone = {*(item.job for item in state.ended), *(item.job for item in state.draining)}
    newest = max((node.heard_at for node in state.nodes if node.alive and node.heard_at), default=None)
    for node in state.nodes:
        if not node.alive:
            continue
        if newest and node.heard_at and (newest - node.heard_at).total_seconds() > SILENT_S:
            text = f"{node.node.name} has told nothing since {node.heard_at:%H:%M:%S} UTC"
            yield Finding("silent", "", node.node, text, now)
        for part in node.parts:
            job = jobs.get(part.job)
            if job is not None:
                yield from _of_part(job, node, part, now)
            elif part.job not in gone:
                text = f"{node.node.name} has a part of {part.job}, which the scheduler does not know"
                yield Finding("stranger", part.job, node.node, text, now)
    alive = {node.node: node for node in state.nodes if node.alive}
    for job in state.jobs:
        if job.notice.phase is JobPhase.RUNNING:
            yield from _missing(job, alive, now)


def _of_part(job: JobState, node: NodeState, part: PartState, now: datetime) -> Iterator[Finding]:
    notice = job.notice
    if part.epoch < notice.epoch and not any(device.node == node.node for device in job.held_devices):
        text = f"{node.node.name} still has its part of epoch {int(part.epoch)}; it is in epoch {int(notice.epoch)}"
        yield Finding("leftover", notice.job, node.node, text, now)
    runs = notice.phase is JobPhase.RUNNING and part.epoch == notice.epoch
    if not runs or notice.since is None or part.device_ms is None or part.base_ms is None:
        return
    if part.base_at < notice.since:
        return  # what was told is of the time before; the next word is the first
    width = sum(device.node == node.node for device in notice.devices)
    told = (part.device_ms - part.base_ms) / 1e3
    counted = width * (part.at - part.base_at).total_seconds()
    if abs(told - counted) > max(TOLERANCE * counted, TOLERANCE_S * width):
        text = (
            f"{node.node.name} has delivered {told:.0f} device-seconds to it in the last "
            f"{(part.at - part.base_at).total_seconds():.0f} s, {counted:.0f} are counted"
        )
        yield Finding("delivered", notice.job, node.node, text, now)


def _missing(job: JobState, alive: dict[NodeId, NodeState], now: datetime) -> Iterator[Finding]:
    notice = job.notice
    for node_id in Counter(device.node for device in notice.devices):
        node = alive.get(node_id)
        if node is None or node.heard_at is None:
            continue  # a lost node is told to the job
        late = notice.since is None or node.heard_at < notice.since + timedelta(seconds=GRACE_S)
        if not late and not any(part.job == notice.job and part.epoch == notice.epoch for part in node.parts):
            text = f"it says that it runs there, and {node.node.name} has no part of it in epoch {int(notice.epoch)}"
            yield Finding("missing", notice.job, node.node, text, now)
