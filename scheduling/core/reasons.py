"""Sentences for people: why something was decided, and how a job stands or what it waits for, each with its figures.

The policy keeps codes and numbers only (`Action.why`, `Job.why`); they become sentences here, when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from scheduling.core.actions import Action
from scheduling.core.model import Job, State
from scheduling.core.service import slack
from scheduling.core.settings import BASIC, LENT, RANK_NAMES
from scheduling.words import are, devices, listed

_TIERS = {tier: name for tier, name in enumerate(RANK_NAMES) if tier != LENT}


def decision(action: Action, names: Callable[[str], str] = str) -> str:
    """What was decided, for whom, and against what alternative; `names`: how people call nodes.

    Raises:
        KeyError: a code that is not known here.
    """
    return _DECISIONS[str(action.why[0])](_Said(action, names), *action.why[1:])


def standing(job: Job, now: float) -> str:
    """How a job stands at `now`: what it waits for, or what it runs on and for how long its level is safe."""
    if job.state is State.WAITING:
        return _waiting(job, now)
    if job.state is State.HELD:
        return "A person holds it."
    if job.state is State.STOPPING:
        return f"It stops; its {devices(job.taken)} are others' as soon as it says that it has."
    width = devices(job.width) if job.width == job.ranks else f"{job.width} of its {devices(job.ranks)}"
    if job.state is State.CHANGING:
        return f"It is being started on {width}, or brought to them; it delivers nothing meanwhile."
    return " ".join(part for part in (f"It runs on {width}.", _level(job, now), _claimed(job)) if part)


@dataclass(frozen=True, slots=True)
class _Said:
    """A decision in words."""

    action: Action
    names: Callable[[str], str]

    @property
    def who(self) -> str:
        """The job that it is about."""
        return _name(self.action.job)

    @property
    def whom(self) -> str:
        """The job that it is for."""
        assert self.action.beneficiary is not None
        return _name(self.action.beneficiary)

    @property
    def kept(self) -> int:
        """How many devices the job has when it is done."""
        return sum(self.action.places.values())

    @property
    def where(self) -> str:
        """These and their nodes."""
        return f"{devices(self.kept)} on {_nodes(self.action.places, self.names)}"


# -- decisions ----------------------------------------------------------------------------------------------------


def _free(said: _Said, width: int, free: int, again: bool) -> str:
    start = "resumes" if again else "starts"
    what = start if said.action.kind == "place" else f"grows by {devices(width)}"
    return f"{said.who} {what}: it has {said.where}; {are(free)} free."


def _level_needs(said: _Said, width: int, free: int, _: bool) -> str:
    return (
        f"{said.who} gets {devices(width)}, and has {said.where}: it may hardly stand still any longer "
        f"in this hour if its level is to be kept; {are(free)} free."
    )


def _narrow(said: _Said, width: int, free: int, ranks: int) -> str:
    return (
        f"{said.who} starts narrow, on {width} of its {devices(ranks)}, rather than wait for all of them: "
        f"it has {said.where}; {are(free)} free."
    )


def _held(said: _Said, width: int, since_s: float) -> str:
    return (
        f"{said.who} gets the {devices(width)} that were held for it, and has {said.where}: the last of "
        f"those who gave way has done so, {since_s:.0f} s after they were told to."
    )


def _idle(said: _Said, extra: int, free: int) -> str:
    return (
        f"{said.who} grows by {devices(extra)}, and has {said.where}: {are(free)} free that nobody who waits can use."
    )


def _idle_elsewhere(said: _Said, width: int, free: int) -> str:
    return (
        f"{said.who} moves, to grow: it will have {said.where}. Where it is, there is no room; "
        f"{are(free)} free in all that nobody who waits can use."
    )


def _gives_way(
    said: _Said, _: str, rank: int, width: int, free: int, cost: int, tried: int, urgent: bool
) -> str:  # fmt: skip
    job = said.action.job
    what = "is preempted" if said.action.kind == "preempt" else f"shrinks to {said.kept} of {job.ranks}"
    need = f"{said.whom} needs {devices(width)}, {are(free)} free"
    if urgent:
        need += ", and its level would be missed otherwise"
    elif rank == job.rank:
        need += ", and it has had less or has less time left"
    return (
        f"{said.who} {what}: {need}. Of the ways through {tried} node{'s' * (tried != 1)} that were looked at, this "
        f"one costs others least: {cost} device-seconds."
    )


def _makes_room(said: _Said, _: str, width: int, free: int, cost: int) -> str:
    return (
        f"{said.who} moves to {said.where}: {said.whom} needs {devices(width)} on one "
        f"node; {are(free)} free, but apart. The moves cost {cost} device-seconds, and nobody is preempted for it."
    )


def _drains(said: _Said, node: str, no_room: str = "", free: int = 0) -> str:
    name, node = said.who, said.names(node)
    if not no_room and said.action.kind == "preempt":
        return f"{name} is preempted, and goes on elsewhere: {node} is being emptied."
    if not no_room:
        return f"{name} moves off {node}, which is being emptied: it will have {said.where}."
    what = (
        "is preempted, and waits for a place"
        if said.action.kind == "preempt"
        else f"shrinks to {said.kept} of {said.action.job.ranks}"
    )
    return f"{name} {what}: {node} is being emptied, and elsewhere {are(free)} free, in no place that suits it."


_DECISIONS: dict[str, Callable[..., str]] = {
    "free": _free,
    "level": _level_needs,
    "narrow": _narrow,
    "held": _held,
    "idle": _idle,
    "idle elsewhere": _idle_elsewhere,
    "gives way": _gives_way,
    "makes room": _makes_room,
    "drains": _drains,
}


# -- standing -----------------------------------------------------------------------------------------------------


def _waiting(job: Job, now: float) -> str:
    if job.claim:
        return _claimed(job)
    if not job.why:
        return "It is looked at in the next round."
    return _WAITS[str(job.why[0])](job, now, *job.why[1:])


def _claimed(job: Job) -> str:
    if not job.claim:
        return ""
    here = sum(job.claim.values())
    if job.reserves:
        return (
            f"It has waited so long that what becomes free on {_nodes(job.claim)} is kept for it: {here - job.missing} "
            f"of {devices(here)}."
        )
    who = listed(job.why[3:], nothing="others") if job.why[:1] == ("claims",) else "others"
    return (
        f"It waits for {who} to stop or shrink: of {devices(here)} on {_nodes(job.claim)} {here - job.missing} are "
        f"held for it, {job.missing} are still in use."
    )


def _cooling(job: Job, now: float, until: float) -> str:
    sooner = ", or as soon as its level needs it" if job.admitted is not None else ""
    left = max(0.0, until - now)
    return f"It gave up its devices, or others did not give up theirs, just now: it is placed in {left:.0f} s{sooner}."


def _blocked(job: Job, now: float, missing: int, free: int, lower: int, *promise: Any) -> str:
    most = "together " if job.unit > 1 or job.ranks > 1 else ""
    text = f"It needs {devices(missing)} {most}of {_pools(job)}; {are(free)} free"
    if lower:
        text += f", and {lower} are used by jobs without a promise, of which none may be disturbed for it now"
    elif job.rank == BASIC:
        text += "; others of its tier have their turn"
    return " ".join(part for part in (f"{text}.", _promise(promise)) if part)


def _never(job: Job, now: float, width: int, unit: int, total: int, largest: int) -> str:
    side = f", {unit} on each node" if unit > 1 else ""
    return (
        f"It never fits: at its narrowest it needs {devices(width)}{side}, and the largest of {_pools(job)} has "
        f"{devices(total)}, at most {largest} on a node."
    )


def _no_pool(job: Job, now: float, *pools: str) -> str:
    return f"There are no nodes of {listed(pools)}."


def _next_round(job: Job, now: float, *figures: Any) -> str:
    return "What it waited for is over; it is looked at in the next round."


def _unpromised(job: Job, now: float, *figures: Any) -> str:
    return _promise(job.why)


def _promise(why: tuple[Any, ...]) -> str:
    """Why a level is not promised."""
    if why and why[0] == "quota":
        _, tenant, promised, amount, quota = why
        return (
            f"Its level is not promised yet, until then it gets what others leave: tenant {tenant} may have {quota:g} "
            f"devices promised, {promised:g} are; this job's level takes {amount:g}."
        )
    if why and why[0] == "beside":
        _, pool, widest, beside = why
        return (
            f"Its level is not promised yet, until then it gets what others leave: premium jobs would leave "
            f"{devices(beside)} of {pool}, and a standard job needs {widest} together."
        )
    if why and why[0] == "cap":
        _, pool, promised, amount, cap, before = why
        kept = f", and room is kept for {before}, which has waited longer" if before else ""
        return (
            f"Its level is not promised yet, until then it gets what others leave: of {pool} {cap:g} devices may be "
            f"promised, {promised:g} are{kept}; this job's level takes {amount:g}."
        )
    return ""


_WAITS: dict[str, Callable[..., str]] = {
    "cooling": _cooling,
    "blocked": _blocked,
    "never": _never,
    "no pool": _no_pool,
    "held": _next_round,
    "claims": _next_round,
    "reserves": _next_round,
    "quota": _unpromised,
    "cap": _unpromised,
    "beside": _unpromised,
}


def _level(job: Job, now: float) -> str:
    if job.admitted is None:
        return _promise(job.why)
    left = slack(job, now)
    return f"Its level is promised; in this hour it may stand still for {max(0.0, left):.0f} s more."


# -- words --------------------------------------------------------------------------------------------------------


def _name(job: Job) -> str:
    return f"{_TIERS[job.ask.tier].capitalize()} job {job.id}"


def _nodes(places: Iterable[Any], names: Callable[[str], str] = str) -> str:
    return listed(names(node.name) for node in sorted(places, key=lambda node: node.order))


def _pools(job: Job) -> str:
    return listed([job.pool.key] if job.pool is not None else job.ask.pools, last="or")
