"""Sentences of the live fleet besides those of `core.reasons`, which say why the policy has decided something: what
persons ask for, what is refused, and what a job waits for. Each with its figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from model.control import Demand, JobNotice
from model.ids import DeviceId, NodeId
from model.units import counted
from scheduling.accounts import CORE_TIER
from scheduling.core.settings import LEVELS
from scheduling.words import are, devices, listed


def job_name(notice: JobNotice) -> str:
    """How a job is called, such as ``premium job cnn``."""
    return f"{notice.demand.tier} job {notice.job}"


def node_names(nodes: Iterable[NodeId]) -> str:
    """Nodes by name, the first few."""
    return listed(dict.fromkeys(node.name for node in nodes))


def where(placed: Sequence[DeviceId]) -> str:
    """Devices and their nodes, such as ``2 devices on node-1``."""
    return f"{devices(len(placed))} on {node_names(device.node for device in placed)}"


# -- decisions -------------------------------------------------------------------------------------------------


def admitted(notice: JobNotice) -> str:
    """That a job's level is promised."""
    level = LEVELS[CORE_TIER[notice.demand.tier]]
    return f"{100 * level:.0f} % of its device time is promised to {job_name(notice)} in every hour from now on."


def resized(notice: JobNotice, on: Sequence[DeviceId]) -> str:
    """A person's resize."""
    return f"A person resizes {job_name(notice)} from {devices(len(notice.devices))} to {where(on)}."


def moved(notice: JobNotice, node: NodeId, width: int, free: int) -> str:
    """Why a job is moved."""
    return f"A person moves {job_name(notice)} to {node.name}: needs {devices(width)}, {are(free)} free there."


def lost(notice: JobNotice, nodes: Sequence[NodeId]) -> str:
    """Why a job is told that its nodes are lost."""
    verb = "is" if len(nodes) == 1 else "are"
    return f"{node_names(nodes)} {verb} lost: {job_name(notice)} goes on elsewhere from its newest checkpoint."


def ask() -> str:
    """Why a job is asked for its notice."""
    return "The scheduler asks what this job holds: it was restored, or a node says something else."


# -- refusals --------------------------------------------------------------------------------------------------


def unknown_node(name: str, nodes: Iterable[str]) -> str:
    """A move to a node that is not there."""
    known = sorted(nodes)
    there = f"the fleet has {listed(known, 20)}" if known else "the fleet has no node"
    return f"There is no node {name}; {there}."


def node_full(name: str, width: int, free: int) -> str:
    """A move to a node with too few free devices."""
    return f"{name} has {devices(free)} free, the job needs {width}."


def node_unsuitable(name: str, problem: str) -> str:
    """A move to a node that the job may not use."""
    return f"{name} does not suit the job: {problem}."


def cordoned(name: str) -> str:
    """A move to a node on which nothing new is placed."""
    return f"{name} is cordoned: nothing new is placed there until `ergo node uncordon {name}`."


def already_there(name: str) -> str:
    """A move to where the job is."""
    return f"The job is on {name} already."


def nothing_to_move(notice: JobNotice) -> str:
    """A move or a resize of a job that holds no devices, or is under way already."""
    holds = "is under way already" if notice.devices else "holds no devices"
    return f"The job is {notice.phase} and {holds}; it can be moved and resized while it runs."


def that_wide(width: int) -> str:
    """A resize to the width that a job has."""
    return f"The job runs on {devices(width)} already: there is nothing to do."


def no_room(extra: int, free: int) -> str:
    """A resize to more devices than are free."""
    return (
        f"It needs {devices(extra)} more, and {are(free)} free that it can use: ask for fewer, or again when others "
        "have given some up (`ergo fleet` shows who has them)."
    )


# -- waiting ---------------------------------------------------------------------------------------------------


def never(demand: Demand, width: int, total: int, most_on_node: int) -> str:
    """More than the fleet has."""
    kind = f" of {demand.accelerator}" if demand.accelerator else ""
    of_class = " of its class" if demand.numerics else ""
    if total < width:
        return f"needs {devices(width)}{kind}; the fleet has {total}{of_class}"
    return (
        f"needs {devices(demand.ranks_per_group)} on one node for each process tree; "
        f"no node has more than {most_on_node}{of_class}"
    )


def no_nodes() -> str:
    """No node has come yet."""
    return "the fleet has no node"


def blocked(
    width: int,
    free: int,
    together: int | None,
    lower: int,
    promised: int,
    kept: int,
    cordoned: int,
    stopping: Sequence[JobNotice],
    starting: Sequence[JobNotice],
    *,
    ended: bool,
) -> str:
    """Neither free devices nor preemption help now.

    Args:
        width: devices that it needs.
        free: devices that are free, where most are.
        together: of these, how many are on one node, where that is too few for a process tree; else None.
        lower: devices of running jobs that would give way to it.
        promised: devices of standard jobs, which would give way to it were its own level promised.
        kept: devices that are kept for others.
        cordoned: devices that are free on cordoned nodes.
        stopping: jobs that are giving theirs up.
        starting: jobs of lower tiers that are being started, and are left alone until they run.
        ended: whether there are devices of ended jobs that may still have processes.
    """
    text = f"{free} of {devices(width)} free"
    if together is not None and free:
        text += f", at most {together} on one node, which is too few for a process tree"
    if kept:
        text += f" ({kept} more kept for jobs before it)"
    if cordoned:
        text += f" ({cordoned} more on cordoned nodes)"
    if stopping:
        return f"{text}; waits for {_givers(stopping)} to stop"
    if ended:
        return f"{text}; waits for the processes of an ended job to be gone"
    if starting:
        return f"{text}; {_givers(starting)} {'is' if len(starting) == 1 else 'are'} being started"
    if lower:
        return f"{text}; with the {devices(lower)} of lower tiers it still does not fit"
    if promised:
        return f"{text}; it may preempt no standard job before its own level is promised"
    return f"{text}; nothing of a lower tier to preempt"


def over_quota(level: float, tenant: str, promised: float, quota: float) -> str:
    """No level can be promised: the tenant's quota is used up. Figures in devices times level."""
    return f"{_unpromised(level)}: {tenant} has {promised:.4g} of a quota of {counted(quota, 'device')}; "


def over_cap(level: float, promised: float, cap: float, amount: float) -> str:
    """No level can be promised: the fleet's capacity is, or is too small; empty where there is none."""
    if not promised:
        return (
            f"{_unpromised(level)}: it takes {amount:.4g} of the {cap:.4g} devices that may be promised; "
            if cap
            else ""
        )
    return f"{_unpromised(level)}: {promised:.4g} of the {cap:.4g} devices that may be promised are; "


def no_width(level: float, widest: int, beside: int) -> str:
    """No level can be promised: a standard job needs `widest` devices together, and premium jobs would leave fewer."""
    left = devices(beside)
    return f"{_unpromised(level)}: premium jobs would leave {left}, and a standard job needs {widest} together; "


def _unpromised(level: float) -> str:
    return f"its {100 * level:.0f} % is not promised yet"


def claimed(width: int, free: int, stopping: Sequence[JobNotice], shrinking: Sequence[JobNotice] = ()) -> str:
    """Others are giving theirs up, or some of them."""
    waits = [f"{_givers(jobs)} to {what}" for what, jobs in (("stop", stopping), ("shrink", shrinking)) if jobs]
    for_whom = " and ".join(waits) or "the processes of an ended job to be gone"
    return f"{free} of {devices(width)} free; waits for {for_whom}"


def _givers(notices: Sequence[JobNotice]) -> str:
    return listed(f"{job_name(item)} ({where(item.devices)})" if item.devices else job_name(item) for item in notices)


def cooling(seconds: float) -> str:
    """It was preempted just now, or its start failed."""
    return f"gave its devices up just now; is placed again in {max(1, math.ceil(seconds))} s at the earliest"


def settling() -> str:
    """The scheduler was restored."""
    return "the scheduler was restored from an older snapshot and waits for all jobs to tell what they hold"
