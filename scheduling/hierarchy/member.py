"""What a cluster does for the level above: it bids for a job, gives one up, and takes one on."""

from __future__ import annotations

from dataclasses import dataclass

from scheduling.core.book import Book
from scheduling.core.model import Ask, State, promise_of
from scheduling.core.placing import find
from scheduling.core.reclaiming import Reclaimer
from scheduling.core.settings import BASIC, LENT

PATIENCE_S = 600.0
REMEMBERED = 1024
"""Answers that are kept, in case an order comes again."""


@dataclass(frozen=True, slots=True)
class Passport:
    """A job between two clusters: what it is, and what it has had and waited for, so that it loses nothing by moving.

    Attributes:
        served: device-seconds delivered to it; `waits_since` the time (s) since which it waits.
    """

    ask: Ask
    served: float
    waits_since: float


@dataclass(frozen=True, slots=True)
class Order:
    """A message to a member: ``bid``, ``release`` or ``adopt``.

    Attributes:
        member: whom it is for; where that is a path, its first part gets it.
        level: who says it: each level numbers its messages by itself.
    """

    kind: str
    member: str
    number: int
    ask: Ask
    passport: Passport | None = None
    level: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a member says to an order: yes or no; and the job itself, where it has given it up."""

    number: int
    yes: bool
    passport: Passport | None = None


def bid(book: Book, ask: Ask, now: float) -> float | None:
    """Device-seconds that it would cost others here if a job started now; None: it would not start now."""
    for key in ask.pools:
        pool = book.pools.get(key)
        if pool is None:
            continue
        if find(pool, ask.ranks, ask.unit) is not None:
            return 0.0
        room = book.settings.cap * pool.capacity * 100 - pool.hundredths
        if ask.tier != BASIC and promise_of(ask) <= room:
            stranger = Book(book.settings).submit(ask, now)
            way = Reclaimer(book.settings, book.waiting, stranger, ask.ranks, now, ask.tier, False).find(pool)
            if way is not None:
                return way.cost
    return None


class Desk:
    """A cluster's side of the moves. Every order may come twice, and is answered twice the same.

    Attributes:
        leaving: jobs that were told to stop, so that they can be given up, and since when (s).
    """

    def __init__(self, book: Book) -> None:
        self.book = book
        self.leaving: dict[str, float] = {}
        self._answers: dict[tuple[str, int], Answer] = {}

    def answer(self, order: Order, now: float) -> Answer:
        """Does what the level above says. One that runs is only told to stop (the shell sees it in `leaving`): it is
        given up when the level asks again.
        """
        known = self._answers.get((order.level, order.number))
        if known is not None:
            return known
        name = order.ask.id
        if order.kind == "bid":
            return Answer(order.number, name not in self.book.jobs and bid(self.book, order.ask, now) is not None)
        if order.kind == "adopt":
            assert order.passport is not None
            self._adopt(order.passport, now)
            return self._keep(order, Answer(order.number, True))
        job = self.book.jobs.get(name)
        if job is not None and job.state is State.RUNNING and job.rank >= LENT and name not in self.leaving:
            self.book.stop(job, now)
            self.book.hold(job, True, now)
            self.leaving[name] = now
        if name in self.leaving and job is not None and job.state is State.STOPPING:
            return Answer(order.number, True)
        passport = self._release(name, now)
        return self._keep(order, Answer(order.number, passport is not None, passport))

    def let_go(self, now: float) -> None:
        """Jobs that were stopped for a level that then fell silent go on here."""
        for name, since in list(self.leaving.items()):
            if now - since >= PATIENCE_S:
                del self.leaving[name]
                if name in self.book.jobs:
                    self.book.hold(self.book.jobs[name], False, now)

    def _keep(self, order: Order, answer: Answer) -> Answer:
        self._answers[order.level, order.number] = answer
        if len(self._answers) > REMEMBERED:
            del self._answers[next(iter(self._answers))]
        return answer

    def _release(self, name: str, now: float) -> Passport | None:
        """Gives a job up; None: it is not here, has a promise here, or devices are under way for it."""
        job = self.book.jobs.get(name)
        held = self.leaving.pop(name, None) is not None
        if job is None or job.rank < LENT or job.claim or not (job.state is State.WAITING or held):
            return None
        passport = Passport(job.ask, job.served, job.waits_since)
        self.book.finish(job, now)
        return passport

    def _adopt(self, passport: Passport, now: float) -> None:
        if passport.ask.id in self.book.jobs:
            return
        job = self.book.submit(passport.ask, now)
        job.served = passport.served
        job.waits_since = min(passport.waits_since, now)
        self.book.waiting.add(job)
