"""Events of a job until they are published: numbered once, in order, and never in the way."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from events.envelope import from_json
from events.types import JobPhaseChangedData
from model.ids import Epoch, Generation, JobId, Step, TenantId
from model.job_state import JobPhase
from workflows.job import outbox
from workflows.job.state import Outbox

NOW = datetime(2026, 11, 30, tzinfo=UTC)


def _append(box: Outbox, step: int, now: datetime = NOW) -> None:
    data = JobPhaseChangedData(before=None, after=JobPhase.QUEUED, reason="because", step=Step(step))
    outbox.append(box, data, now=now, epoch=Epoch(0))


def _batch(box: Outbox, generation: int = 1) -> tuple[str, ...]:
    return outbox.next_batch(
        box,
        job=JobId("a"),
        tenant=TenantId("t"),
        first_run="run",
        generation=Generation(generation),
        cluster="local",
        now_at=10,
    )


def _ids(batch: tuple[str, ...]) -> list[tuple[int, int]]:
    return [(int(event.id.generation), int(event.id.seq)) for event in map(from_json, batch)]


@given(st.lists(st.sampled_from(["event", "publish", "lose answer", "renew"]), max_size=60))
def test_ids_have_no_gaps_and_what_may_be_out_keeps_its_id(steps: list[str]) -> None:
    box, generation, seen, written = Outbox(), 1, [], 0
    for step in steps:
        if step == "event":
            _append(box, written)
            written += 1
        elif step == "renew":
            generation += 1
            outbox.new_generation(box)
        else:
            batch = _batch(box, generation)
            assert _batch(box, generation) == batch
            seen += [(number, document) for number, document in zip(_ids(batch), batch, strict=True)]
            if step == "publish":
                outbox.published(box, NOW)
    by_id = dict(seen)
    assert all(by_id[number] == document for number, document in seen)
    steps_seen = [from_json(by_id[number]).data.step for number in sorted(by_id)]  # type: ignore[union-attr]
    assert steps_seen == list(range(len(steps_seen)))
    for number in {generation for generation, _ in by_id}:
        of_it = sorted(seq for generation, seq in by_id if generation == number)
        assert of_it == list(range(1, len(of_it) + 1))


def test_an_id_that_was_not_ours_is_taken_back() -> None:
    box = Outbox()
    _append(box, 1)
    _append(box, 2)
    assert _ids(_batch(box)) == [(1, 1), (1, 2)]
    outbox.renumber(box)
    outbox.new_generation(box)
    _append(box, 3)
    assert _ids(_batch(box, 2)) == [(2, 1), (2, 2), (2, 3)]


def test_a_backlog_refuses_new_operations() -> None:
    box = Outbox()
    assert outbox.refusal(box, NOW) == ""
    _append(box, 0)
    assert outbox.refusal(box, NOW + timedelta(hours=23)) == ""
    assert "Kafka" in outbox.refusal(box, NOW + timedelta(hours=25))
    for step in range(outbox.MAX_UNPUBLISHED):
        _append(box, step)
    assert "2001 events" in outbox.refusal(box, NOW)
    assert len(_batch(box)) == outbox.BATCH
