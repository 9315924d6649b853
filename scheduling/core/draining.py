"""Empties a node that is about to go, or that a person drains: jobs move, and what cannot move stops in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduling.core.model import Job, Node, State
from scheduling.core.placing import Places, find

if TYPE_CHECKING:
    from scheduling.core.planner import Planner


def drain(planner: Planner, node: Node) -> None:
    """Moves or stops every job that has devices on a closed node and is not under way already."""
    for job in sorted(node.jobs, key=lambda job: (job.rank, job.id)):
        if job.state is State.RUNNING:
            move(planner, job, node, ("drains", node.name))


def move(planner: Planner, job: Job, node: Node, why: tuple[object, ...]) -> None:
    """Takes a job off one node: its devices there are replaced, or the job shrinks, or it stops and waits."""
    book, now = planner.book, planner.now
    kept: Places = {other: count for other, count in job.given.items() if other is not node}
    whole = planner.settings.move_whole
    found = find(node.pool, job.width if whole else job.given[node], job.unit)
    if found is not None:
        target = {} if whole else dict(kept)
        for other, count in found.items():
            target[other] = target.get(other, 0) + count
        book.give(job, found, now, target=target)
        planner.act("move", job, target, why)
        return
    width = sum(kept.values())
    if width in job.widths:
        book.change(job, kept, now)
        planner.act("resize", job, kept, (*why, "no room", node.pool.free))
    else:
        book.stop(job, now)
        planner.act("preempt", job, {}, (*why, "no room", node.pool.free))
