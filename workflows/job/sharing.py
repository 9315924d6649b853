"""Ranks of the job that share a device: what nodes tell of incidents there becomes events, each told once."""

from __future__ import annotations

from typing import Literal

from temporalio import workflow

from events.types import SharingIncidentData
from model.sharing import SharingIncidents, SharingNotice
from workflows.job import outbox
from workflows.job.core import Job, keep_last

KEPT_NOTICES = 20
"""Of how many parts is remembered what has been told: of past epochs only late words come."""

_TIME_LIMIT = (
    "On {node} a rank waited for others of its device until a time limit ended that, {times}: it goes on alone, "
    "which costs time and memory and changes no number."
)
_MISMATCH = (
    "On {node} results of ranks that share a device were taken for equal and were not, {times}; what was computed "
    "counts. Not shared there any more: {unshared}."
)


def noticed(job: Job, notice: SharingNotice) -> None:
    """Tells what is new in a node's word, whose counts are of the whole epoch."""
    state = job.state
    key = (notice.epoch, notice.node)
    known = next((one for one in state.sharing if (one.epoch, one.node) == key), None)
    before = known.incidents if known is not None else SharingIncidents()
    now = notice.incidents
    limits, mismatches = now.time_limits - before.time_limits, now.mismatches - before.mismatches
    if limits <= 0 and mismatches <= 0:
        return
    state.sharing = [one for one in state.sharing if one is not known]
    keep_last(state.sharing, notice, KEPT_NOTICES)
    if limits > 0:
        _tell(job, notice, "time-limit", limits, now.time_limits)
    if mismatches > 0:
        _tell(job, notice, "mismatch", mismatches, now.mismatches)


def _tell(job: Job, notice: SharingNotice, kind: Literal["time-limit", "mismatch"], count: int, total: int) -> None:
    unshared = notice.incidents.unshared if kind == "mismatch" else ()
    sentence = _MISMATCH if kind == "mismatch" else _TIME_LIMIT
    reason = sentence.format(
        node=notice.node.name, times=_times(total), unshared=", ".join(unshared) or "the operator that made them"
    )
    data = SharingIncidentData(kind=kind, node=notice.node, count=count, total=total, unshared=unshared, reason=reason)
    outbox.append(job.state.outbox, data, now=workflow.now(), epoch=job.state.epoch)
    # Limits may come again and again, with scripts whose hosts wait for one another: only the newest word is kept.
    action = f"sharing: {kind}"
    begin = f"On {notice.node.name} "
    kept = [one for one in job.state.decisions if not (one.action == action and one.reason.startswith(begin))]
    job.state.decisions[:] = kept
    job.note(action, reason)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
