"""Times and bounds of the policy, each with its reason."""

from __future__ import annotations

POLICY = "tiers/1"
"""Name and version of the policy; every directive and decision event carries it."""

COOL_DOWN_S = 5.0
"""A job that was placed or preempted less than this ago is not preempted or placed again: a cut of a job that is just
being restored costs both, and two jobs that want the same devices would take turns without a step in between."""

TELL_AGAIN_S = 30.0
"""After this long without an answer a directive is told again, then after twice as long, and so on. Signals are
durable, so that a silent job is nearly always one whose worker is down or that is writing a large checkpoint."""

TELL_AGAIN_MOST_S = 480.0
"""The longest time between two tellings: each is an event in the job's history."""

PATIENCE_S = 120.0
"""How long later jobs of a waiting job's own tier may overtake it on devices that it could use. After that, free
devices are kept for it. Lower tiers may use them all along: it can take those back."""

DRAIN_S = 10.0
"""So long after the end of a terminated job a node that has parts of it has said so: it renews its record every 2 s.
One that never did is believed to have none when it is told of after this long."""

REMEMBER_S = 600.0
"""How long an ended job is remembered. Notices are delivered in seconds; ten minutes outlast an outage's retries."""

SETTLE_S = 15.0
"""After a restored state nothing is given away for so long: jobs have been asked to tell what they hold."""

WAIT_GAP_S = 5.0
"""A job is told a new reason for waiting at most this often: figures in it change with every other job."""

PLACES_AT_ONCE = 100
"""Most jobs that one plan places: each costs time by the number of nodes (about 10 ms at 1,500). The rest come at once
after it, so that a storm of jobs is a few plans in a row and no plan is long."""

WAITS_AT_ONCE = 64
"""Most reasons for waiting told in one plan: each is a signal, and a cluster takes about 50 a second."""

IDLE_S = 600.0
"""A plan is looked at again after this long in any case."""
