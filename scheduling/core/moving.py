"""Defragmentation: small jobs move together, so that a gang whose parts must stay on one node finds a node.

Only for gangs for which devices enough are free, but not side by side; others never need it (facts/scheduling.md §4.6).
"""

from __future__ import annotations

from itertools import islice

from scheduling.core.model import Job, Node, Pool, State
from scheduling.core.reclaiming import Reclaim
from scheduling.core.service import lead_s, slack
from scheduling.core.settings import Settings

NODES = 16
"""So many nodes are looked at, those with most free devices first."""


def make_room(settings: Settings, pool: Pool, job: Job, now: float) -> Reclaim | None:
    """The cheapest moves after which one node has `job.ranks` free devices; None where none is worth it.

    Only whole jobs of one node are moved, to free devices of other nodes.
    """
    width = job.ranks
    if width > pool.size or pool.free < width:
        return None
    most = max(settings.moving_share * pool.devices, width)
    best: Reclaim | None = None
    for order in islice(pool.by_free.downwards(), NODES):
        node = pool.by_order[order]
        if node.size < width:
            continue
        way = _clear(settings, pool, node, width, now)
        if way is not None and (best is None or way.cost < best.cost):
            best = way
    if best is None or sum(victim.width for victim in best.victims) > most:
        return None
    best.tried = NODES
    return best if settings.move_gain_s * width >= settings.move_worth * best.cost else None


def _clear(settings: Settings, pool: Pool, node: Node, width: int, now: float) -> Reclaim | None:
    movable = [job for job in node.jobs if _movable(settings, job, now)]
    # The fewest devices under way: the largest that is not more than what lacks, else the smallest that is.
    movable.sort(key=lambda job: (-job.width, -job.rank, job.id))
    way = Reclaim(places={node: width}, moves=True)
    need = width - node.free
    taken: dict[Node, int] = {}
    while need > 0:
        fitting = [job for job in movable if job not in way.victims]
        fitting = [job for job in fitting if job.width <= need] or fitting[-1:]
        for victim in fitting:
            target = _elsewhere(pool, node, victim.width, taken)
            if target is not None:
                break
            movable.remove(victim)
        else:
            if not fitting:
                return None
            continue
        taken[target] = taken.get(target, 0) + victim.width
        way.victims[victim] = {target: victim.width}
        way.cost += settings.pause_s * victim.width
        need -= victim.width
    return way


def _movable(settings: Settings, job: Job, now: float) -> bool:
    return (
        job.state is State.RUNNING
        and not job.claim
        and len(job.given) == 1
        and now - job.changed >= settings.move_cool_s
        and slack(job, now) >= lead_s(job, settings) + settings.pause_s
    )


def _elsewhere(pool: Pool, node: Node, width: int, taken: dict[Node, int]) -> Node | None:
    """The tightest other node with so many free devices besides those that are taken."""
    for order in pool.by_free.upwards(width, len(taken) + 2):
        other = pool.by_order[order]
        if other is not node and other.free - taken.get(other, 0) >= width:
            return other
    return None
