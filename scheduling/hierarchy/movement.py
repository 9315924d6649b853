"""Which jobs move between the members of a level, as one pure function of what the members told.

A job that has waited long is asked for at one member at a time, the tightest fit first (never at all of them: who asks
all, has all make room and uses one). A member that would start it now says so; then the job is given up where it is,
kept in the level's state, and handed on. A member that is silent is asked again: every message may come twice, and
nothing is done twice because of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from scheduling.core.model import Ask
from scheduling.core.settings import BASIC, LEVELS
from scheduling.hierarchy.member import Answer, Order, Passport
from scheduling.hierarchy.summary import Candidate, Summary


@dataclass(frozen=True, slots=True)
class MovementSettings:
    """Times in seconds.

    Attributes:
        waits_s: a job that has waited so long may move; ten minutes within a region, half an hour between regions.
        narrow_s: one that has run with too few devices for so long.
        gain_s: what it gains is counted over so long, and must be worth `worth` times what the move costs it: `pause_s`
            in which it delivers nothing.
        stale_s: what was told longer ago is not believed: nobody is moved by it.
        again_s: a job that found nothing, or that has moved, is left alone.
        retry_s: a message that was not answered is sent again.
        at_once: how many jobs of one member are moved at a time.
    """

    waits_s: float = 600.0
    narrow_s: float = 1800.0
    gain_s: float = 1800.0
    worth: float = 1.5
    pause_s: float = 120.0
    stale_s: float = 90.0
    again_s: float = 1800.0
    retry_s: float = 60.0
    at_once: int = 8


FLEET = MovementSettings(waits_s=1800.0, narrow_s=3600.0, pause_s=600.0, stale_s=180.0, at_once=4)
"""Between regions: bytes cross a wide-area network."""


class Phase(IntEnum):
    """How far a move is."""

    ASKED = 0
    """A member was asked whether the job would start there. The job is at home."""
    LEAVING = 1
    """Its home was told to give it up."""
    ARRIVING = 2
    """Nobody has it but this level; a member was told to take it."""


@dataclass(frozen=True, slots=True)
class Move:
    """A job on its way. `number` tells an answer to this question from one to an older one."""

    candidate: Candidate
    target: str
    number: int
    since: float
    phase: Phase = Phase.ASKED
    asked: tuple[str, ...] = ()
    passport: Passport | None = None


@dataclass(frozen=True, slots=True)
class LevelState:
    """All that a level must not forget. `rested`: until when jobs are left alone; `name`: its own."""

    moves: Mapping[str, Move] = field(default_factory=dict[str, Move])
    rested: Mapping[str, float] = field(default_factory=dict[str, float])
    numbers: int = 0
    name: str = ""


def decide(
    state: LevelState,
    members: Iterable[Summary],
    answers: Iterable[Answer],
    now: float,
    settings: MovementSettings | None = None,
) -> tuple[LevelState, tuple[Order, ...]]:
    """What the members are told, and the state from then on."""
    round_ = _Round(state, members, now, settings or MovementSettings())
    for answer in answers:
        round_.hear(answer)
    round_.repeat()
    round_.begin()
    return round_.result()


def choose(
    ask: Ask, members: Iterable[Summary], besides: Iterable[str] = (), coming: Mapping[str, int] | None = None
) -> str | None:
    """The member that is asked next: the tightest of those where a job fits, else, for a job with a level, the one that
    may promise most. `coming`: devices by member that others on their way there will need.
    """
    tried = set(besides)
    best: tuple[int, float, str] | None = None
    for member in members:
        if member.name in tried:
            continue
        for key in ask.pools:
            pool = member.pool(key)
            if pool is None or ask.ranks > pool.devices:
                continue
            taken = (coming or {}).get(member.name, 0)
            if pool.fits(ask) and pool.free - taken >= ask.ranks:
                rank = (0, float(pool.free), member.name)
            elif (
                ask.tier != BASIC
                and pool.room >= LEVELS[ask.tier] * (ask.ranks + taken)
                and pool.low >= ask.ranks + taken
            ):
                rank = (1, -pool.room, member.name)
            else:
                continue
            best = rank if best is None else min(best, rank)
    return None if best is None else best[2]


class _Round:
    def __init__(self, state: LevelState, members: Iterable[Summary], now: float, settings: MovementSettings) -> None:
        self.now, self.settings = now, settings
        known = sorted(members, key=lambda member: member.name)
        self.members = {member.name: member for member in known if now - member.at <= settings.stale_s}
        self.moves = dict(state.moves)
        self.rested = {name: until for name, until in state.rested.items() if until > now}
        self.numbers, self.name = state.numbers, state.name
        self.orders: list[Order] = []

    def result(self) -> tuple[LevelState, tuple[Order, ...]]:
        return LevelState(self.moves, self.rested, self.numbers, self.name), tuple(self.orders)

    def hear(self, answer: Answer) -> None:
        """Goes on with a move. What answers an older question changes nothing, unless it brings a job."""
        move = next((move for move in self.moves.values() if move.number == answer.number), None)
        if move is None:
            return
        if move.phase is Phase.ASKED:
            if answer.yes:
                self.tell(replace(move, phase=Phase.LEAVING))
            else:
                self.ask_next(move)
        elif move.phase is Phase.LEAVING:
            if answer.passport is not None:
                self.tell(replace(move, phase=Phase.ARRIVING, passport=answer.passport))
            elif not answer.yes:
                self.end(move)  # it has come to run where it is, or ended
        elif answer.yes:
            self.end(move)

    def repeat(self) -> None:
        """Sends again what was not answered. A question is given up instead: nothing depends on it yet."""
        for move in sorted(self.moves.values(), key=lambda move: move.number):
            if self.now - move.since < self.settings.retry_s:
                continue
            if move.phase is Phase.ASKED:
                self.ask_next(move)
            else:
                self.send(move)
                self.moves[move.candidate.ask.id] = replace(move, since=self.now)

    def begin(self) -> None:
        """Looks for jobs that would be better off elsewhere."""
        going: dict[str, int] = {}
        for move in self.moves.values():
            home = _first(move.candidate.home)
            going[home] = going.get(home, 0) + 1
        candidates = [one for member in self.members.values() for one in member.candidates]
        candidates.sort(key=lambda one: (one.width > 0, one.ask.tier, -one.waits_s, one.ask.id))
        for one in candidates:
            home = _first(one.home)
            if one.ask.id in self.moves or one.ask.id in self.rested or going.get(home, 0) >= self.settings.at_once:
                continue
            if self.worth_it(one) and self.ask_next(Move(one, "", 0, self.now, asked=(home,))):
                going[home] = going.get(home, 0) + 1

    def worth_it(self, one: Candidate) -> bool:
        settings = self.settings
        if not one.width:
            return one.waits_s >= settings.waits_s
        gain = (one.ask.ranks - one.width) * settings.gain_s
        return one.waits_s >= settings.narrow_s and gain >= settings.worth * settings.pause_s * one.width

    def ask_next(self, move: Move) -> bool:
        """Asks the next member; ends the move if there is none."""
        coming: dict[str, int] = {}
        for other in self.moves.values():
            if other is not move:
                coming[other.target] = coming.get(other.target, 0) + other.candidate.ask.ranks
        target = choose(move.candidate.ask, self.members.values(), move.asked, coming)
        if target is None:
            if move.number:
                self.end(move)
            return False
        self.tell(replace(move, target=target, phase=Phase.ASKED, asked=(*move.asked, target)))
        return True

    def tell(self, move: Move) -> None:
        self.numbers += 1
        move = replace(move, number=self.numbers, since=self.now)
        self.moves[move.candidate.ask.id] = move
        self.send(move)

    def send(self, move: Move) -> None:
        kind = ("bid", "release", "adopt")[move.phase]
        member = move.candidate.home if move.phase is Phase.LEAVING else move.target
        self.orders.append(Order(kind, member, move.number, move.candidate.ask, move.passport, self.name))

    def end(self, move: Move) -> None:
        self.moves.pop(move.candidate.ask.id, None)
        self.rested[move.candidate.ask.id] = self.now + self.settings.again_s


def _first(path: str) -> str:
    return path.partition("/")[0]
