"""What was written once is read for ever: golden files of every public shape, and its schema.

A failure here means that stored specs, events or histories of users would break. Never change a golden file to make
this pass; add a version instead. See docs/compatibility.md.
"""

from pathlib import Path

import jsonschema
import orjson
import pytest

from events import envelope
from events.types import EVENT_TYPES
from model import runtime
from model.codec import from_json, to_json
from model.job_spec import parse_job_spec
from model.placement import Placement
from scripts.export_schemas import FOLDER, schemas

GOLDEN = Path(__file__).parent / "golden"


def files(folder):
    found = sorted((GOLDEN / folder).glob("*.json"))
    assert found, f"no golden file in {folder}"
    return [pytest.param(path, id=path.stem) for path in found]


def keeps(written, read):
    """Whether all that was written is still there with the same value; defaults may have been added."""
    if isinstance(written, dict):
        return isinstance(read, dict) and all(key in read and keeps(value, read[key]) for key, value in written.items())
    if isinstance(written, list):
        return isinstance(read, list) and len(written) == len(read) and all(map(keeps, written, read))
    return written == read


@pytest.mark.parametrize("path", files("job_spec"))
def test_job_specs(path):
    written = orjson.loads(path.read_bytes())
    spec = parse_job_spec(path.read_bytes())
    if isinstance(written.get("host_memory_bytes"), str):
        written["host_memory_bytes"] = spec.host_memory_bytes
    assert keeps(written, orjson.loads(spec.to_json()))
    assert parse_job_spec(spec.to_json()) == spec


@pytest.mark.parametrize("path", [*files("placement"), *files("runtime")])
def test_placements_and_runtime_calls(path):
    shape = Placement if path.parent.name == "placement" else getattr(runtime, path.stem)
    value = from_json(shape, path.read_bytes())
    assert keeps(orjson.loads(path.read_bytes()), orjson.loads(to_json(value)))


def test_every_call_has_a_golden_file():
    shapes = {name for name in vars(runtime) if name.endswith(("Input", "Result")) or name == "Progress"}
    assert {path.stem for path in (GOLDEN / "runtime").glob("*.json")} == shapes


@pytest.mark.parametrize("path", files("events"))
def test_events_as_documents(path):
    event = envelope.from_json(path.read_bytes())
    assert event.type == path.stem
    assert keeps(orjson.loads(path.read_bytes()), orjson.loads(envelope.to_json(event)))
    jsonschema.Draft202012Validator(envelope.json_schemas()[event.type]).validate(orjson.loads(path.read_bytes()))


@pytest.mark.parametrize("path", files("kafka"))
def test_events_as_kafka_messages(path):
    message = orjson.loads(path.read_bytes())
    headers = [(name, value.encode()) for name, value in message["headers"]]
    event = envelope.from_kafka(orjson.dumps(message["value"]), headers)
    written = envelope.to_kafka(event)
    assert (written.topic, written.key.decode()) == (message["topic"], message["key"])
    assert set(headers) <= set(written.headers)
    assert keeps(message["value"], orjson.loads(written.value))


def test_every_event_type_has_golden_files():
    for folder in ("events", "kafka"):
        assert {path.stem for path in (GOLDEN / folder).glob("*.json")} == set(EVENT_TYPES)


def test_the_checked_in_schemas_are_those_of_the_code():
    checked_in = {path.name: path.read_bytes() for path in FOLDER.glob("*.schema.json")}
    made = schemas()
    stale = sorted(name for name in {*checked_in, *made} if checked_in.get(name) != made.get(name))
    assert not stale, f"run `python -m scripts.export_schemas` and look at the difference in {stale}"
