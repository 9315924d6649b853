"""Policies of the field, as simple as they are published, on the same book and the same placement as ours."""

from __future__ import annotations

from scheduling.core.actions import Action, Plan
from scheduling.core.book import Book
from scheduling.core.model import Job, State
from scheduling.core.placing import find


class _Baseline:
    """Keeps its own queue; the book's timers and promises are not used."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.queue: dict[Job, None] = {}
        self.durations: dict[str, float] = {}

    def arrived(self, job: Job, duration_s: float) -> None:
        """It waits at the end of the queue."""
        self.queue[job] = None
        self.durations[job.id] = duration_s

    def stopped(self, job: Job) -> None:
        """It waits again."""
        self.queue[job] = None

    def finished(self, job: Job) -> None:
        """It is forgotten."""
        self.queue.pop(job, None)
        self.durations.pop(job.id, None)

    def node_lost(self) -> None:
        """Who lost devices comes back by `stopped`."""

    def place(self, job: Job, now: float) -> Action | None:
        """Places a job at its full width, if it fits."""
        for key in job.ask.pools:
            pool = self.book.pools.get(key)
            found = find(pool, job.ranks, job.unit) if pool is not None else None
            if found is not None:
                self.queue.pop(job, None)
                self.book.give(job, found, now)
                return Action("place", job, dict(job.given), ("free", job.ranks))
        return None


class Fifo(_Baseline):
    """In the order of submission; up to `skip` jobs that do not fit are passed over."""

    def __init__(self, book: Book, skip: int = 0) -> None:
        super().__init__(book)
        self.skip = skip

    def plan(self, now: float) -> Plan:
        """Places from the head of the queue."""
        self.book.timers.clear()
        actions: list[Action] = []
        failed = 0
        for job in list(self.queue):
            action = self.place(job, now)
            if action is not None:
                actions.append(action)
            else:
                failed += 1
                if failed > self.skip:
                    break
        return Plan(tuple(actions), None)


class _Ranked(_Baseline):
    """Runs the jobs with the lowest keys; the others give way."""

    every_s = 0.0
    cool_s = 60.0

    def __init__(self, book: Book) -> None:
        super().__init__(book)
        self.placed: dict[Job, None] = {}
        self.round_at = -1e18

    def key(self, job: Job, now: float) -> tuple[float, float, str]:
        """The lower, the sooner."""
        raise NotImplementedError

    def stopped(self, job: Job) -> None:
        """It waits again."""
        self.placed.pop(job, None)
        super().stopped(job)

    def finished(self, job: Job) -> None:
        """It is forgotten."""
        self.placed.pop(job, None)
        super().finished(job)

    def plan(self, now: float) -> Plan:
        """Who should run, runs; who runs and should not gives way where that is needed."""
        self.book.timers.clear()
        actions: list[Action] = []
        if now - self.round_at >= self.every_s:
            self.round_at = now
            actions += self._make_room(now)
        for _, job in sorted((self.key(job, now), job) for job in self.queue):
            if sum(pool.free for pool in self.book.pools.values()) == 0:
                break
            action = self.place(job, now)
            if action is not None:
                self.placed[job] = None
                actions.append(action)
        wake = self.round_at + self.every_s if self.every_s and self.queue else None
        return Plan(tuple(actions), wake)

    def _make_room(self, now: float) -> list[Action]:
        if not self.queue:
            return []
        ranked = sorted((self.key(job, now), job) for job in [*self.queue, *self.placed])
        room = sum(pool.devices for pool in self.book.pools.values())
        needed, losers = 0, list[Job]()
        for _, job in ranked:
            if job.ranks <= room:
                room -= job.ranks
                if job in self.queue:
                    needed += job.ranks
            elif job in self.placed:
                losers.append(job)
        needed -= sum(pool.free for pool in self.book.pools.values())
        needed -= sum(job.ranks for job in self.placed if job.state is State.STOPPING)
        actions: list[Action] = []
        for job in reversed(losers):
            if needed <= 0:
                break
            if job.state is State.RUNNING and now - job.changed >= self.cool_s:
                needed -= job.ranks
                self.book.stop(job, now)
                actions.append(Action("preempt", job, {}, ("order",)))
        return actions


class LeastAttained(_Ranked):
    """Two-dimensional least attained service, in rounds: device-seconds had so far, in few bands, then submission."""

    every_s = 300.0
    _bands = (3600.0, 8 * 3600.0, 64 * 3600.0)

    def key(self, job: Job, now: float) -> tuple[float, float, str]:
        """Band, submission."""
        served = job.served + job.rate * (now - job.at)
        return float(sum(1 for band in self._bands if served >= band)), job.ask.submitted, job.id


class ShortestRemaining(_Ranked):
    """An oracle: it knows how long every job still takes."""

    def key(self, job: Job, now: float) -> tuple[float, float, str]:
        """Remaining seconds at full width."""
        served = job.served + job.rate * (now - job.at)
        return self.durations[job.id] - served / job.ranks, job.ask.submitted, job.id
