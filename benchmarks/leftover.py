"""Shortest remaining time first on a capacity that changes: an oracle, without costs and without places."""

from __future__ import annotations

from collections.abc import Sequence

from scheduling.simulator.workload import TraceJob


def shortest_first(jobs: Sequence[TraceJob], capacity: Sequence[tuple[float, int]], after: int) -> list[float]:
    """Completion times in seconds, in no order.

    Jobs run at full width or not at all; whoever has the least left to do comes first, who does not fit is passed over.
    Nothing costs time, devices are all alike, and none is too far from another.

    Args:
        jobs: each fits into `after`.
        capacity: (seconds, devices), in order; each holds until the next, the first from the beginning.
        after: devices from the last of these on, when the other jobs have ended.

    Raises:
        ValueError: a job does not fit.
    """
    if any(job.devices > after for job in jobs):
        raise ValueError(f"A job asks for more than {after} devices.")
    arrivals = sorted(jobs, key=lambda job: (job.submit_s, job.id), reverse=True)
    changes = list(reversed(capacity))
    room_now = changes.pop()[1] if changes else after
    left: dict[str, float] = {}
    by_id = {job.id: job for job in jobs}
    running: list[str] = []
    now, done = 0.0, list[float]()
    while left or arrivals:
        ends = now + min((left[id] for id in running), default=float("inf"))
        arrives = arrivals[-1].submit_s if arrivals else float("inf")
        at = min(ends, arrives, changes[-1][0] if changes else float("inf"))
        for id in running:
            left[id] -= at - now
        now = at
        for id in [id for id in running if left[id] <= 1e-6]:
            del left[id]
            done.append(now - by_id[id].submit_s)
        while arrivals and arrivals[-1].submit_s <= now:
            job = arrivals.pop()
            left[job.id] = job.duration_s
        while changes and changes[-1][0] <= now:
            _, room_now = changes.pop()
            room_now = room_now if changes else after
        room, running = room_now, []
        for _, id in sorted((remaining, id) for id, remaining in left.items()):
            if by_id[id].devices <= room:
                room -= by_id[id].devices
                running.append(id)
            if room <= 0:
                break
    return done
