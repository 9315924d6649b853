import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.codec import adapter, from_json, from_value, to_json
from model.errors import ModelError
from model.ids import CheckpointId, DeviceId, Epoch, EventId, Generation, JobId, NodeId, Sequence, Step, TenantId

labels = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
nodes = st.builds(NodeId, labels, st.integers(1, 2**63 - 1))
devices = st.builds(DeviceId, nodes, st.lists(labels, min_size=1, max_size=4).map(tuple))
counters = st.integers(0, 2**63 - 1)
events = st.builds(
    EventId,
    labels.map(JobId),
    st.uuids().map(str),
    counters.map(Generation),
    st.integers(1, 2**63 - 1).map(Sequence),
)


@given(st.one_of(nodes, devices, events))
def test_structured_ids_read_what_they_write(value):
    assert type(value).parse(str(value)) == value
    assert from_json(type(value), to_json(value)) == value


@given(st.text(max_size=12), st.sampled_from([JobId, TenantId, CheckpointId]))
def test_a_text_id_is_its_text_or_is_refused(text, kind):
    try:
        value = kind(text)
    except ModelError as error:
        assert error.remedy
    else:
        assert value == text
        assert from_json(kind, to_json(value)) == value


@given(st.text(alphabet="a1/@-.", max_size=16), st.sampled_from([NodeId, DeviceId, EventId]))
def test_any_text_is_parsed_exactly_or_refused(text, kind):
    try:
        value = kind.parse(text)
    except ModelError:
        return
    assert str(value) == text


@pytest.mark.parametrize("text", ["", "A", "-a", "a-", "a_b", "a/b", "ä", "a\n", "a" * 64])
def test_a_job_id_is_a_label(text):
    with pytest.raises(ModelError, match="not the id of a job"):
        JobId(text)


@pytest.mark.parametrize("text", ["n", "n@", "n@0", "n@01", "n@-1", "@1", "N@1", "n@1/", "n@1 ", "n@1@2", f"n@{2**63}"])
def test_a_node_id_needs_name_and_incarnation(text):
    with pytest.raises(ModelError, match="not the id of a node"):
        NodeId.parse(text)


@pytest.mark.parametrize("text", ["n@1", "n@1/", "n@1//a", "n/gpu-0", "n@1/a/b/c/d/e", "n@1/GPU"])
def test_a_device_id_needs_node_and_path(text):
    with pytest.raises(ModelError, match="not the id of a device"):
        DeviceId.parse(text)


@pytest.mark.parametrize("text", ["j/r/0", "j/r/0/0", "j/r/0/1/2", "j/r/00/1", "j/r/0/+1", "j//0/1", "J/r/0/1"])
def test_an_event_id_has_four_parts(text):
    with pytest.raises(ModelError, match="not the id of an event"):
        EventId.parse(text)


@pytest.mark.parametrize("text", [f"j/r/{2**63}/1", f"j/r/0/{2**63}"])
def test_counters_of_an_event_id_are_bounded(text):
    with pytest.raises(ModelError, match=r"9223372036854775808 is not a"):
        EventId.parse(text)


def test_a_part_of_a_device_knows_its_parent():
    part = DeviceId.parse("node-7@2/gpu-0/mig-1")
    assert part.parent == DeviceId(NodeId("node-7", 2), ("gpu-0",))
    assert part.parent.parent is None


@pytest.mark.parametrize("kind", [Epoch, Step, Generation, Sequence])
def test_counters_are_integers_within_bounds(kind):
    assert from_json(kind, b"7") == 7
    assert type(from_json(kind, b"7")) is kind
    assert kind(7).next == 8
    assert kind.parse("7") == 7
    for bad in (-1, 2**63):
        with pytest.raises(ModelError):
            kind(bad)
    for bad in ("", "-1", "+1", "01", "1_0", "٣", " 1"):
        with pytest.raises(ModelError):
            kind.parse(bad)
    for bad in (b"-1", b'"7"', b"7.5", b"true", str(2**63).encode()):
        with pytest.raises(ModelError):
            from_json(kind, bad)


def test_ids_are_values():
    assert {NodeId("n", 1): 1}[NodeId.parse("n@1")] == 1
    assert NodeId("n", 2) > NodeId("n", 1)
    with pytest.raises(AttributeError):
        NodeId("n", 1).name = "m"


def test_a_structured_id_is_a_string_in_json():
    with pytest.raises(ModelError, match="must be a string"):
        from_value(NodeId, {"name": "n", "incarnation": 1})


def test_schemas_hold_the_patterns():
    for kind, good, bad in [(NodeId, "n@1", "n"), (JobId, "a", "A"), (EventId, "j/r/0/1", "j")]:
        pattern = adapter(kind).json_schema()["pattern"]
        assert re.search(pattern, good)
        assert not re.search(pattern, bad)
