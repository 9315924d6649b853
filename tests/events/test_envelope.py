from datetime import UTC, datetime, timedelta, timezone

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events import envelope
from events.types import (
    EVENT_TYPES,
    CheckpointCommitted,
    DecisionData,
    DecisionMade,
    JobPhaseChanged,
    JobPhaseChangedData,
    PlacementData,
    Topic,
)
from model.errors import ModelError
from model.ids import DeviceId, Epoch, EventId, Generation, JobId, NodeId, Sequence, Step, TenantId
from model.job_state import TRANSITIONS, JobPhase

JOB = JobId("char-gpt")


def context(**changes):
    return {
        "id": EventId(JOB, "run-1", Generation(0), Sequence(1)),
        "source": "/clusters/local",
        "subject": JOB,
        "time": datetime(2026, 1, 31, 12, tzinfo=UTC),
        "tenant": TenantId("team-a"),
        "epoch": Epoch(3),
        **changes,
    }


def phase_changed(**changes):
    data = {"before": JobPhase.QUEUED, "after": JobPhase.STARTING, "reason": "Devices are free.", "step": Step(0)}
    return JobPhaseChanged(**context(), data=JobPhaseChangedData(**{**data, **changes}))


transitions = st.sampled_from([(before, after) for before, those in TRANSITIONS.items() for after in sorted(those)])
events = st.builds(
    lambda pair, reason, step, time, epoch, seq: JobPhaseChanged(
        **context(id=EventId(JOB, "r", Generation(0), Sequence(seq)), time=time, epoch=Epoch(epoch)),
        data=JobPhaseChangedData(before=pair[0], after=pair[1], reason=reason, step=Step(step)),
    ),
    transitions,
    st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable()),
    st.integers(0, 2**63 - 1),
    st.datetimes(timezones=st.just(UTC)),
    st.integers(0, 2**63 - 1),
    st.integers(1, 2**63 - 1),
)


@given(events)
def test_both_forms_read_what_they_write(event):
    assert envelope.from_json(envelope.to_json(event)) == event
    message = envelope.to_kafka(event)
    assert envelope.from_kafka(message.value, message.headers) == event


def test_the_kafka_message_is_a_cloudevent_in_binary_mode():
    message = envelope.to_kafka(phase_changed())
    headers = dict(message.headers)
    assert len(headers) == len(message.headers)
    assert headers == {
        "content-type": b"application/json",
        "ce_specversion": b"1.0",
        "ce_id": b"char-gpt/run-1/0/1",
        "ce_source": b"/clusters/local",
        "ce_type": b"ergosphere.job.phase-changed.v1",
        "ce_subject": b"char-gpt",
        "ce_time": b"2026-01-31T12:00:00Z",
        "ce_tenant": b"team-a",
        "ce_epoch": b"3",
        "ce_partitionkey": b"char-gpt",
    }
    assert (message.topic, message.key) == ("ergo.job-events.v1", b"char-gpt")
    assert orjson.loads(message.value)["after"] == "starting"


def test_a_reader_ignores_what_it_does_not_know():
    event = phase_changed()
    document = orjson.loads(envelope.to_json(event))
    document["traceparent"] = "00-1"
    document["data"]["colour"] = "blue"
    assert envelope.from_json(orjson.dumps(document)) == event
    message = envelope.to_kafka(event)
    assert envelope.from_kafka(message.value, [*message.headers, ("ce_traceparent", b"00-1"), ("other", b"1")]) == event


def test_header_names_and_charset_as_other_clients_write_them():
    event = phase_changed()
    message = envelope.to_kafka(event)
    headers = [header for header in message.headers if header[0] != "content-type"]
    assert envelope.from_kafka(message.value, [("Content-Type", b"application/json; charset=UTF-8"), *headers]) == event


def test_an_unknown_type_has_its_own_code():
    document = {**orjson.loads(envelope.to_json(phase_changed())), "type": "ergosphere.job.phase-changed.v2"}
    with pytest.raises(ModelError, match="unknown to this build") as caught:
        envelope.from_json(orjson.dumps(document))
    assert caught.value.code == "events.unknown-type"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"type": None}, "`type` is missing"),
        ({"id": "char-gpt/run-1/0"}, "not the id of an event"),
        ({"subject": "other"}, "which is another job"),
        ({"specversion": "0.3"}, "`specversion` is '0.3', but must be '1.0'"),
        ({"time": "2026-01-31T12:00:00+01:00"}, "must be a time in UTC"),
        ({"time": "2026-01-31T12:00:00"}, "must be a time in UTC"),
        ({"epoch": -1}, "`epoch` is -1"),
        ({"source": ""}, "`source` is ''"),
        ({"source": "a b"}, "`source` is 'a b'"),
        ({"data": None}, "`data` is None"),
    ],
)
def test_what_is_no_event(change, words):
    document = {**orjson.loads(envelope.to_json(phase_changed())), **change}
    with pytest.raises(ModelError, match=words) as caught:
        envelope.from_json(orjson.dumps(document))
    assert caught.value.code == "events.invalid"


@pytest.mark.parametrize("document", [b"[]", b"1", b"{}", b'"x"'])
def test_json_that_is_no_event(document):
    with pytest.raises(ModelError, match="`type` is missing"):
        envelope.from_json(document)


def without(name):
    return [header for header in envelope.to_kafka(phase_changed()).headers if header[0] != name]


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ([], "'ce_specversion' is missing"),
        (without("ce_specversion"), "'ce_specversion' is missing"),
        (without("content-type"), "content type is ''"),
        ([("content-type", b"application/avro"), *without("content-type")], "'application/avro'"),
        ([("ce_x", b"\xff"), *without("")], "not UTF-8"),
    ],
)
def test_what_is_no_cloudevent(headers, words):
    with pytest.raises(ModelError, match=words) as caught:
        envelope.from_kafka(b"{}", headers)
    assert caught.value.code == "events.not-an-event"


@pytest.mark.parametrize("text", [b"", b"-1", b"x", b"9" * 19, b"9" * 5000, "\u0663".encode()])
def test_an_epoch_header_that_is_no_epoch(text):
    message = envelope.to_kafka(phase_changed())
    with pytest.raises(ModelError, match="`epoch`"):
        envelope.from_kafka(message.value, [*without("ce_epoch"), ("ce_epoch", text)])


def test_a_tombstone_is_no_event():
    with pytest.raises(ModelError, match="it has no value"):
        envelope.from_kafka(None, envelope.to_kafka(phase_changed()).headers)


@given(st.binary(max_size=40), st.lists(st.tuples(st.text(max_size=8), st.binary(max_size=8)), max_size=4))
def test_any_message_gives_an_event_or_a_sentence(value, headers):
    with pytest.raises(ModelError):
        envelope.from_kafka(value, [*without(""), *headers, ("ce_type", b"ergosphere.decision.made.v1")])


def test_a_phase_follows_only_where_it_may():
    with pytest.raises(ValueError, match="A job that is completed cannot become queued"):
        phase_changed(before=JobPhase.COMPLETED, after=JobPhase.QUEUED)
    assert phase_changed(before=None, after=JobPhase.QUEUED).data.before is None


@pytest.mark.parametrize(("action", "placed"), [("place", False), ("preempt", True)])
def test_a_decision_has_a_placement_where_it_gives_one(action, placed):
    placement = PlacementData(devices=(DeviceId(NodeId("n", 1), ("g",)),), device_of_rank=(0,)) if placed else None
    with pytest.raises(ValueError, match=f"A decision to {action}"):
        DecisionData(action=action, reason="R.", policy="p", state_digest="0" * 64, placement=placement)


def test_an_event_needs_utc():
    with pytest.raises(ValueError, match="UTC"):
        JobPhaseChanged(
            **context(time=datetime(2026, 1, 31, 12, tzinfo=timezone(timedelta(hours=1)))), data=phase_changed().data
        )


def test_types_and_topics_stay():
    assert [*Topic] == [
        "ergo.job-events.v1",
        "ergo.decisions.v1",
        "ergo.usage.v1",
        "ergo.telemetry.v1",
        "ergo.dead-letters.v1",
    ]
    assert all(shape.model_fields["type"].default == name for name, shape in EVENT_TYPES.items())
    assert [JobPhaseChanged.topic, CheckpointCommitted.topic, DecisionMade.topic] == [
        Topic.JOB_EVENTS,
        Topic.JOB_EVENTS,
        Topic.DECISIONS,
    ]
