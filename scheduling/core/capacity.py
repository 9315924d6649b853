"""Nodes and their devices: numbers and indexes that always agree. What belongs to whom is `book`'s business."""

from __future__ import annotations

import re

from scheduling.core.model import Ask, Node, Pool, Rack, least_width, promise_of
from scheduling.core.settings import PREMIUM


def sort_key(name: str) -> str:
    """Sorts ``node-2`` before ``node-10``."""
    return re.sub(r"\d+", lambda found: found.group().zfill(8), name)


def new_node(pool: Pool, name: str, rack_name: str, size: int, until: float | None) -> Node:
    """A node that is in its pool, with all of its devices free."""
    rack = pool.racks.get(rack_name)
    if rack is None:
        rack = pool.racks[rack_name] = Rack(rack_name, sort_key(rack_name))
        pool.racks_by_empty.add(0, (0, rack.order))
        pool.rack_by_order[rack.order] = rack
    node = Node(name, pool, rack, size, f"{rack.order}/{sort_key(name)}", until)
    rack.nodes[node.order] = node
    pool.nodes[name] = node
    pool.by_order[node.order] = node
    pool.sizes[size] = pool.sizes.get(size, 0) + 1
    pool.size = max(pool.size, size)
    pool.devices += size
    _enlist(node, +1)
    return node


def drop_node(node: Node) -> None:
    """A node is gone."""
    if not node.closed:
        _enlist(node, -1)
    node.alive = False
    pool, rack = node.pool, node.rack
    del pool.nodes[node.name], pool.by_order[node.order], rack.nodes[node.order]
    if not rack.nodes:
        pool.racks_by_empty.remove(rack.empty, (0, rack.order))
        del pool.racks[rack.name], pool.rack_by_order[rack.order]
    pool.devices -= node.size
    pool.sizes[node.size] -= 1
    if not pool.sizes[node.size]:
        del pool.sizes[node.size]
        pool.size = max(pool.sizes, default=0)


def close(node: Node, closed: bool) -> None:
    """A closed node is in no index: nothing is found there, and nothing is promised out of it."""
    if node.closed != closed and node.alive:
        _enlist(node, -1 if closed else +1)
        node.closed = closed


def update(node: Node, free: int = 0, low: int = 0, mid: int = 0) -> None:
    """Changes a node's numbers, and its pool's with them."""
    old_free, old_low = node.free, node.free + node.low
    old_mid = old_low + node.mid
    node.free += free
    node.low += low
    node.mid += mid
    if node.closed or not node.alive:
        return
    pool, order = node.pool, node.order
    new_free, new_low = node.free, node.free + node.low
    new_mid = new_low + node.mid
    pool.free += free
    pool.low += low
    pool.mid += mid
    if free:
        pool.by_free.remove(old_free, (0, order))
        pool.by_free.add(new_free, (0, order))
        size = node.size
        if (old_free == size) != (new_free == size):
            _count_empty(node.rack, pool, +1 if new_free == size else -1)
    if free or low:
        pool.by_low.remove(old_low, (-old_free, order))
        pool.by_low.add(new_low, (-new_free, order))
    if new_mid != old_mid or new_low != old_low:
        pool.by_mid.remove(old_mid, (-old_low, order))
        pool.by_mid.add(new_mid, (-new_low, order))


def promise(pool: Pool, ask: Ask, sign: int) -> None:
    """A level is promised out of a pool, or (-1) no more."""
    pool.hundredths += sign * promise_of(ask)
    if ask.tier == PREMIUM:
        pool.fixed += sign * ask.ranks
    elif sign > 0:
        pool.widest.add(least_width(ask))
    else:
        pool.widest.remove(least_width(ask))


def _enlist(node: Node, sign: int) -> None:
    pool, free, order = node.pool, node.free, node.order
    low = free + node.low
    if node.until is None:
        pool.capacity += sign * node.size
    pool.free += sign * free
    pool.low += sign * node.low
    pool.mid += sign * node.mid
    for index, bucket, item in (
        (pool.by_free, free, (0, order)),
        (pool.by_low, low, (-free, order)),
        (pool.by_mid, low + node.mid, (-low, order)),
    ):
        if sign > 0:
            index.add(bucket, item)
        else:
            index.remove(bucket, item)
    if free == node.size:
        _count_empty(node.rack, pool, sign)


def _count_empty(rack: Rack, pool: Pool, sign: int) -> None:
    pool.racks_by_empty.remove(rack.empty, (0, rack.order))
    rack.empty += sign
    pool.racks_by_empty.add(rack.empty, (0, rack.order))
