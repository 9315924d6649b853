"""Whether a generation can be cut at all: a rank that has died is in no checkpoint, and no job goes on without it.

A rank that has exited with 0 is no obstacle: its peers may have more to do, and the checkpoint says how it ended.
"""

from __future__ import annotations

import time

from proxy_runtime.shim.generation import Generation
from proxy_runtime.shim.spec import RunError

LAUNCHERS_S = 60.0
"""How long after the death of a process of its tree a launcher may take to end: only then has the tree gone on."""


def death(generation: Generation) -> RunError | None:
    """Who has died, as far as it has been noticed; of several the one that did not die of another's end."""
    if (dead := generation.dead_proxy()) is not None:
        return _lost(f"the device proxy of device {dead} has died")
    bad = [rank for rank in generation.ranks if rank.exit is not None and rank.exit.code != 0]
    if bad:
        first = min(bad, key=lambda rank: rank.bereft)
        assert first.exit is not None
        return _lost(first.exit.sentence)
    killed = generation.claimants.killed
    if killed is not None and time.clock_gettime(time.CLOCK_BOOTTIME) - killed.at < LAUNCHERS_S:
        return _lost(killed.sentence, code="run.dying")  # the job itself may not be lost
    return None


def require_living(generation: Generation) -> None:
    """Looks who has ended.

    Raises:
        RunError: ``run.lost``: a rank has ended otherwise than with 0, or a device proxy is gone. ``run.dying``: a
            process of the job's tree was killed a moment ago.
    """
    generation.poll_exits()
    if (why := death(generation)) is not None:
        raise why


def _lost(sentence: str, code: str = "run.lost") -> RunError:
    return RunError(
        f"{sentence}; no checkpoint is made of what is left.",
        code=code,
        remedy="The job goes on from its newest checkpoint, where it has one.",
    )
