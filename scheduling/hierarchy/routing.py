"""What a region does with the orders of the fleet: each goes on to one cluster, and to the same if it comes again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scheduling.core.model import Ask
from scheduling.hierarchy.member import REMEMBERED, Order
from scheduling.hierarchy.movement import choose
from scheduling.hierarchy.summary import Summary


@dataclass(frozen=True, slots=True)
class Routes:
    """All that a region must not forget of these: by job, the cluster that was asked for it last, or has taken it."""

    clusters: Mapping[str, str] = field(default_factory=dict[str, str])


def route(routes: Routes, order: Order, members: Iterable[Summary]) -> tuple[Routes, str | None]:
    """The cluster that gets an order from above; None: the job would start nowhere, which answers a bid.

    A job that is given up is where its path says. One that comes goes to the cluster that made the bid for it.

    Raises:
        ValueError: an order to take a job that is larger than every cluster: the region made no bid for it.
    """
    name = order.ask.id
    if order.kind == "release":
        return routes, order.member.rpartition("/")[2]
    if order.kind == "adopt" and name in routes.clusters:
        return routes, routes.clusters[name]
    known = sorted(members, key=lambda member: member.name)
    found = choose(order.ask, known)
    clusters = {job: cluster for job, cluster in routes.clusters.items() if job != name}
    if order.kind == "adopt" and found is None:
        found = _largest(order.ask, known)  # it is on its way, and has to be somewhere
    if found is not None:
        clusters[name] = found
        if len(clusters) > REMEMBERED:
            del clusters[next(iter(clusters))]
    return Routes(clusters), found


def _largest(ask: Ask, members: Iterable[Summary]) -> str:
    sizes = [
        (pool.devices, member.name)
        for member in members
        for key in ask.pools
        if (pool := member.pool(key)) is not None and pool.devices >= ask.ranks
    ]
    if not sizes:
        raise ValueError(f"Job {ask.id} of {ask.ranks} ranks is larger than every cluster of the region.")
    return max(sizes, key=lambda size: (size[0], size[1]))[1]
