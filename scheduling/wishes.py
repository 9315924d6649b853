"""What persons wish of running jobs, to move or to be resized: granted from what is free, or refused, saying why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from model.control import JobNotice
from model.ids import DeviceId
from scheduling import reasons
from scheduling.bridge import Bridge, Room, class_key
from scheduling.core.model import Job, State
from scheduling.core.placing import fewer, find_more
from scheduling.state import JobState


@dataclass(frozen=True, slots=True)
class Answer:
    """What becomes of a wish; `devices`: all that the job has afterwards, none where it is refused."""

    action: Literal["migrate", "resize", "refuse"]
    reason: str
    devices: tuple[DeviceId, ...] = ()


def unanswered(job: JobState) -> bool:
    """Whether a job has a wish that it has not been answered."""
    notice = job.notice
    done = notice.request == job.answered != ""
    return notice.wants in ("move", "resize") and job.told is None and not done


def answer(bridge: Bridge, notice: JobNotice) -> Answer:
    """The answer, with which the book is changed already."""
    known = bridge.book.jobs.get(notice.job)
    return _move(bridge, notice, known) if notice.wants == "move" else _resize(bridge, notice, known)


def _resize(bridge: Bridge, notice: JobNotice, known: Job | None) -> Answer:
    book, width, has = bridge.book, notice.width, len(notice.devices)
    if known is None or known.state is not State.RUNNING or not known.given:
        return Answer("refuse", reasons.nothing_to_move(notice))
    if width == has:
        return Answer("refuse", reasons.that_wide(width))
    if width < has:
        target = fewer(known, width)
        book.change(known, target, bridge.time)
    else:
        pool = next(iter(known.given)).pool
        more = find_more(pool, known, width - has)
        if more is None:
            return Answer("refuse", reasons.no_room(width - has, pool.free))
        book.give(known, more, bridge.time)
        target = dict(known.given)
    devices = bridge.after(notice, target)
    return Answer("resize", reasons.resized(notice, devices), devices)


def _move(bridge: Bridge, notice: JobNotice, known: Job | None) -> Answer:
    name = notice.move_to or ""
    node = bridge.alive.get(name) or bridge.alive.get(name.rpartition("@")[0])
    width = len(notice.devices)
    if node is None:
        return Answer("refuse", reasons.unknown_node(name, bridge.alive))
    if known is None or known.state is not State.RUNNING:
        return Answer("refuse", reasons.nothing_to_move(notice))
    if all(device.node == node.node for device in notice.devices):
        return Answer("refuse", reasons.already_there(name))
    demand = notice.demand
    if demand.numerics is not None and class_key(demand.numerics) != class_key(node.numerics):
        return Answer("refuse", reasons.node_unsuitable(name, "its numerics class is another"))
    there = [room for room in bridge.rooms.values() if room.node == node.node and room.pool in known.ask.pools]
    if not there:
        return Answer("refuse", reasons.node_unsuitable(name, f"it has no {demand.accelerator or 'device'}"))
    if node.node.name in bridge.cordoned:
        return Answer("refuse", reasons.cordoned(name))

    def free_in(room: Room) -> int:
        return bridge.book.nodes[room.name].free if node.node not in bridge.closed else 0

    best = max(there, key=free_in)
    free = free_in(best)
    if free < width:
        return Answer("refuse", reasons.node_full(name, width, free))
    target = {bridge.book.nodes[best.name]: width}
    bridge.book.give(known, target, bridge.time, target=target)
    return Answer("migrate", reasons.moved(notice, node.node, width, free), bridge.take(target))
