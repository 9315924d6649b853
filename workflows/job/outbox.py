"""A job's events: written down with its state, published in order by one coroutine, never in the way of its work.

An event gets its id when it is first handed to the publisher, and keeps it: the broker may have it. So what was in
flight at a continue-as-new or at a reset is published again under the same id, which consumers drop; what comes later
is numbered in the generation that this run holds.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import orjson
from pydantic import BaseModel, ValidationError

from events.envelope import from_json, to_json
from events.types import CheckpointCommittedData, DecisionData, JobPhaseChangedData, SharingIncidentData
from model.errors import ModelError
from model.ids import Epoch, EventId, Generation, JobId, Sequence, TenantId
from workflows.job.state import Outbox

BATCH = 100
"""Events published by one activity."""

MAX_UNPUBLISHED = 2000
"""With more, new operations are refused; the job itself runs on."""

MAX_AGE = timedelta(hours=24)

_TYPES: dict[type[BaseModel], str] = {
    JobPhaseChangedData: "ergosphere.job.phase-changed.v1",
    CheckpointCommittedData: "ergosphere.checkpoint.committed.v1",
    DecisionData: "ergosphere.decision.made.v1",
    SharingIncidentData: "ergosphere.sharing.incident.v1",
}


def append(outbox: Outbox, data: BaseModel, *, now: datetime, epoch: Epoch) -> None:
    """Writes an event down."""
    draft = {
        "type": _TYPES[type(data)],
        "time": now.isoformat(),
        "epoch": int(epoch),
        "data": data.model_dump(mode="json"),
    }
    if not outbox.unpublished:
        outbox.oldest = now
    outbox.drafts.append(orjson.dumps(draft).decode())


def next_batch(
    outbox: Outbox, *, job: JobId, tenant: TenantId, first_run: str, generation: Generation, cluster: str, now_at: int
) -> tuple[str, ...]:
    """The events to publish now: those that may be under way already, or the next ones, numbered.

    Args:
        outbox: of the job.
        job: the subject.
        tenant: whose it is.
        first_run: of the job's chain of runs.
        generation: that this run holds.
        cluster: the source.
        now_at: length of the workflow's history, which tells one task from another.
    """
    if not outbox.batch:
        outbox.numbered_at = now_at
        drafts, outbox.drafts = outbox.drafts[:BATCH], outbox.drafts[BATCH:]
        for draft in drafts:
            event_id = EventId(job, first_run, generation, Sequence(outbox.seq + 1))
            document = {
                **orjson.loads(draft),
                "id": str(event_id),
                "source": f"/clusters/{cluster}",
                "subject": str(job),
                "tenant": str(tenant),
            }
            try:
                outbox.batch.append(to_json(from_json(orjson.dumps(document))).decode())
            except (ModelError, ValidationError):
                continue  # a draft of ours that no reader would take: it must not hold up all that follow
            outbox.seq += 1
    return tuple(outbox.batch)


def published(outbox: Outbox, now: datetime) -> None:
    """The broker has acknowledged the batch."""
    outbox.batch.clear()
    outbox.oldest = now if outbox.drafts else None


def renumber(outbox: Outbox) -> None:
    """Takes the ids of the batch back: this run had no right to them."""
    drafts: list[str] = []
    for document in outbox.batch:
        event = orjson.loads(document)
        drafts.append(orjson.dumps({name: event[name] for name in ("type", "time", "epoch", "data")}).decode())
    outbox.drafts = [*drafts, *outbox.drafts]
    outbox.batch.clear()


def new_generation(outbox: Outbox) -> None:
    """Numbers start again at 1; what has its id keeps it."""
    outbox.seq = 0


def refusal(outbox: Outbox, now: datetime) -> str:
    """Why no new operation is begun; empty where nothing speaks against it."""
    count = outbox.unpublished
    if count > MAX_UNPUBLISHED:
        return f"{count} events of the job are not published yet: look after Kafka, then try again."
    if count and outbox.oldest is not None and now - outbox.oldest > MAX_AGE:
        return f"Events of the job are not published since {outbox.oldest:%Y-%m-%d %H:%M} UTC: look after Kafka."
    return ""
