"""Where a gang fits: tightest first, on one node, in one rack, on few nodes. Nodes are looked up, never scanned."""

from __future__ import annotations

from scheduling.core.model import Job, Node, Pool

Places = dict[Node, int]
"""Devices by node."""


def find(pool: Pool, width: int, unit: int = 1) -> Places | None:
    """Free devices for a gang, every node with a multiple of `unit`; None where it does not fit.

    On the node where the fewest stay free. A gang larger than a node takes whole nodes of the rack that has the fewest
    empty ones, else of few racks, and its rest on the tightest node. Where there are not enough whole nodes it takes
    the roomiest nodes, the last one the tightest.
    """
    if width > pool.free:
        return None
    if width <= pool.size:
        order = pool.by_free.first(width)
        if order is not None:
            return {pool.by_order[order]: width}
    elif pool.size % unit == 0 and (whole := _whole_nodes(pool, width)) is not None:
        return whole
    if unit > 1 and not _fits_in_units(pool, width, unit):
        return None
    return _spread(pool, width, unit)


def find_more(pool: Pool, job: Job, extra: int) -> Places | None:
    """Free devices besides those that a job has: on its own nodes first, then as for a gang of its own."""
    found: Places = {}
    for node in sorted(job.given, key=lambda node: (-node.free, node.order)):
        if not node.closed and extra:
            part = min(node.free, extra) // job.unit * job.unit
            if part:
                found[node] = part
                extra -= part
    if not extra:
        return found
    return _spread(pool, extra, job.unit, found) if found else find(pool, extra, job.unit)


def fewer(job: Job, width: int) -> Places:
    """What a job keeps of its devices at a smaller width: on as few nodes as possible."""
    kept: Places = {}
    for node in sorted(job.given, key=lambda node: (node.closed, -job.given[node], node.order)):
        part = min(job.given[node], width)
        if part:
            kept[node] = part
            width -= part
    return kept


def find_elsewhere(pool: Pool, job: Job, width: int) -> Places | None:
    """One node that takes the whole job at `width`, where its own has no room for it."""
    if width > pool.size:
        return None
    order = pool.by_free.first(width)
    return None if order is None else {pool.by_order[order]: width}


def find_occupied(pool: Pool, width: int, unit: int) -> Places | None:
    """Devices for a gang as if jobs below the levels had none, on the nodes where these have most; None: too few."""
    found: Places = {}
    names = pool.by_low.upwards(width, 1) if width <= pool.size and pool.by_low.first(width) else None
    for order in names or pool.by_low.downwards(unit):
        node = pool.by_order[order]
        part = min(node.free + node.low, width) // unit * unit
        if part:
            found[node] = part
            width -= part
        if not width:
            return found
    return None


def fits_empty(pool: Pool, width: int, unit: int) -> bool:
    """Whether a gang fits a pool on which nothing runs."""
    if unit == 1:
        return pool.devices >= width
    return sum(count * (size // unit * unit) for size, count in pool.sizes.items()) >= width


def _whole_nodes(pool: Pool, width: int) -> Places | None:
    size = pool.size
    count, rest = divmod(width, size)
    if len(pool.by_free.counts) <= size or pool.by_free.counts[size] < count:
        return None
    found: Places = {}
    racks = pool.racks_by_empty
    tightest = racks.first(count)
    if tightest is not None:
        _add_empty(pool, tightest, count, found)
    if len(found) < count:  # a rack's empty nodes may be smaller than the largest
        found.clear()
        for name in racks.downwards():
            _add_empty(pool, name, count, found)
            if len(found) == count:
                break
    if rest:
        for order in pool.by_free.upwards(rest, count + 1):
            node = pool.by_order[order]
            if node not in found:
                found[node] = rest
                return found
        return None
    return found


def _add_empty(pool: Pool, rack_order: str, count: int, found: Places) -> None:
    nodes = pool.rack_by_order[rack_order].nodes
    for order in sorted(order for order, node in nodes.items() if node.free == pool.size and not node.closed):
        if len(found) == count:
            return
        found[nodes[order]] = pool.size


def _fits_in_units(pool: Pool, width: int, unit: int) -> bool:
    return sum(count * (free // unit * unit) for free, count in enumerate(pool.by_free.counts)) >= width


def _spread(pool: Pool, width: int, unit: int, found: Places | None = None) -> Places | None:
    """The roomiest nodes besides those in `found`, and the tightest for the rest."""
    found = {} if found is None else found
    counts = pool.by_free.counts
    for free in range(len(counts) - 1, unit - 1, -1):
        if not counts[free]:
            continue
        most = free // unit * unit
        for _, order in pool.by_free.buckets[free]:
            if pool.by_order[order] in found:
                continue
            if width <= most:
                # The last: the tightest node that is not in use yet.
                for last in pool.by_free.upwards(width, len(found) + 1):
                    node = pool.by_order[last]
                    if node not in found:
                        found[node] = width
                        return found
            found[pool.by_order[order]] = most
            width -= most
            if not width:
                return found
    return None
