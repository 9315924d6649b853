"""Times and bounds of the policy, each with its reason."""

from __future__ import annotations

from scheduling.core.settings import Settings

POLICY = "levels/1"
"""Name and version of the policy; every directive and decision event carries it."""

COOL_DOWN_S = 5.0
"""A job that was placed or preempted less than this ago is not preempted by its like or placed again: a cut of a job
that is just being restored costs both, and two jobs that want the same devices would take turns without a step in
between."""

PLACES_AT_ONCE = 100
"""Most jobs that one plan places: each is a directive with all of its devices. The rest come at once after it, so that
a storm of jobs is a few plans in a row and no plan is large."""

LIVE = Settings(
    pause_s=4.0,  # a cut, a dump and a restore on the local fleet, as the demo measures them
    cool_s=(0.0, COOL_DOWN_S, COOL_DOWN_S, COOL_DOWN_S),
    again_s=COOL_DOWN_S,
    places_at_once=PLACES_AT_ONCE,
    fails_per_rank=200,  # every plan begins anew: who failed in the last one is tried again
    move_whole=True,  # every device that it has is left behind, as a drained node has to be
)
"""The policy's settings in a live fleet."""

TELL_AGAIN_S = 30.0
"""After this long without an answer a directive is told again, then after twice as long, and so on. Signals are
durable, so that a silent job is nearly always one whose worker is down or that is writing a large checkpoint."""

TELL_AGAIN_MOST_S = 480.0
"""The longest time between two tellings: each is an event in the job's history."""

DRAIN_S = 10.0
"""So long after the end of a terminated job a node that has parts of it has said so: it renews its record every 2 s.
One that never did is believed to have none when it is told of after this long."""

REMEMBER_S = 600.0
"""How long an ended job is remembered. Notices are delivered in seconds; ten minutes outlast an outage's retries."""

SETTLE_S = 15.0
"""After a restored state nothing is given away for so long: jobs have been asked to tell what they hold."""

WAIT_GAP_S = 5.0
"""A job is told a new reason for waiting at most this often: figures in it change with every other job."""

WAITS_PER_S = 5.0
"""Most new reasons a second, over all jobs: each is a signal, a cluster takes about 50 a second, and decisions come
first. Where thousands wait, each is told less often; its first reason it is told at once."""

WAITS_AT_ONCE = 64
"""Most reasons for waiting told in one plan."""

ASKS_AT_ONCE = 200
"""Most jobs that one plan asks for their notices, or tells again what they have not answered. A plan is one payload of
the workflow's history, which may have 2 MB, and telling it takes some 20 ms a job."""

STOPS_AT_ONCE = 500
"""Most jobs that one plan tells to stop, or that their nodes are lost. It is decided for all; the others are told with
the next plans."""

IDLE_S = 600.0
"""A plan is looked at again after this long in any case."""
