"""Levels, times and bounds of the policy, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

HOUR_S = 3600.0
"""Levels are kept by the hour, counted from each job's own admission: with clock hours all jobs would need their last
minutes at the same moment."""

PREMIUM, STANDARD, LENT, BASIC = range(4)
"""Ranks, in the order of who comes first and who gives way. *Lent*: a guaranteed job that is not admitted yet and runs
on what others leave, before the basic tier."""

LEVELS = (0.95, 0.70, 0.0, 0.0)
"""GPU fraction per hour that a rank is promised."""

RANK_NAMES = ("premium", "standard", "not yet admitted", "basic")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the policy is tuned by. Times in seconds.

    Attributes:
        pause_s: what a change of width or place costs a job, measured; leads and costs follow from it.
        cap: share of the capacity that may be promised. Above it an hour in thousands is missed, below it none
            (facts/scheduling.md §4.2).
        enter_short: share of the capacity that admitted jobs may lack: above it nobody is admitted at the expense of
            standard jobs, since all that lack something will want it back at about the same time. `short`: above it
            no basic job that has waited long takes from them.
        cool_s: by rank of a victim: it is left alone for so long after a change. Without it two jobs take turns
            without a step in between.
        again_s: a job that was preempted is not placed before.
        grow_cool_s: a job's width does not grow within this time of its last change, unless its level needs it.
        grow_every_s: how often idle devices are offered to narrow jobs.
        hold_s: devices that were freed for a job are held for it at most so long.
        stop_cost_s: device-seconds that stopping a job costs besides its pause, beside making others narrower: it has
            to wait for a new place.
        regain_s: device-seconds that every device costs which a standard job loses: it will want it back.
        enter_slack_s: a standard job may make way for one that is to be admitted if it has so much slack.
        steal_slack_s: one standard job gives way to another only if it has so much more slack; a third of that where
            the other would miss its level.
        turn_every_s: how often waiting basic jobs may have running ones give way.
        quantum_s: a basic job runs at least so long before one that had less may have its turn.
        age_s: a basic job that has waited so long comes before all other basic ones, and may take from any that ran
            `aged_quantum_s`; the longer it waits beyond that, the less long they need have run. After twice that time
            what becomes free on some nodes is kept for it for `aged_quantum_s`, at the end of which it may take the
            rest: so its turn comes whatever the others are. A guaranteed job that has waited so long has room for its
            promise kept for it.
        served_bands: delivered device-seconds at which a basic job falls back behind those that had less.
        fails_per_rank: waiting jobs of different shapes for which a way at the expense of others is sought in vain in
            one round; after these only free devices are looked at, for `tries_per_rank` shapes in all.
        reclaim_nodes: how many nodes are looked at for one reclaim; for a gang over m nodes 4 m more.
        blast: devices that others lose per device asked for, at most where there is a choice.
        places_at_once, grows_at_once: bounds of one plan.
        usage_half_life_s: what a tenant has used counts half after this time.
        drain_lead_s: a leased node is emptied so long before it goes away.
        lead_by_size, lead_most: see `service.lead_s`; never more than this part of the slack of an hour.
        retry_s: a job whose slack is used up is tried again after this time.
        move_cool_s, move_gain_s, move_worth, moving_share: a job is moved out of another's way at most once in the
            first of these, at most this share of a pool's devices at once, and only if what the other gains in
            `move_gain_s` is worth `move_worth` times what the moved ones lose. See `moving`.
        moves: whether running jobs may be told to move, so that others find room or they themselves can grow.
        move_whole: a move leaves every device that a job has; it is off a draining node in no other way.
    """

    pause_s: float = 30.0
    cap: float = 0.90
    cool_s: tuple[float, float, float, float] = (0.0, 120.0, 60.0, 60.0)
    again_s: float = 60.0
    grow_cool_s: float = 300.0
    grow_every_s: float = 30.0
    hold_s: float = 900.0
    stop_cost_s: float = 1500.0
    short: float = 0.05
    enter_short: float = 0.15
    regain_s: float = 300.0
    steal_slack_s: float = 900.0
    enter_slack_s: float = 750.0
    turn_every_s: float = 300.0
    quantum_s: float = 5400.0
    aged_quantum_s: float = 2 * HOUR_S
    age_s: float = 6 * HOUR_S
    served_bands: tuple[float, ...] = (HOUR_S, 8 * HOUR_S, 64 * HOUR_S, 512 * HOUR_S)
    fails_per_rank: int = 24
    tries_per_rank: int = 64
    reclaim_nodes: int = 24
    blast: float = 2.0
    places_at_once: int = 200
    grows_at_once: int = 200
    usage_half_life_s: float = 7 * 24 * HOUR_S
    drain_lead_s: float = 60.0
    retry_s: float = 15.0
    lead_by_size: float = 8.0
    lead_most: float = 0.75
    move_cool_s: float = 1800.0
    move_gain_s: float = 600.0
    move_worth: float = 1.5
    moving_share: float = 0.02
    moves: bool = True
    move_whole: bool = False

    def lead_s(self, rank: int) -> float:
        """How long before its zero-slack time (s) a job is served whatever it takes: a standard one earlier, since it
        has more slack to spare and often to wait until others have given way, which takes a pause itself.
        """
        return min((5.0 if rank == STANDARD else 3.0) * self.pause_s, self.lead_most * (1.0 - LEVELS[rank]) * HOUR_S)
