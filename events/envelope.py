"""How an event travels: CloudEvents 1.0, as one JSON document or as a Kafka message.

In Kafka's binary mode the attributes are headers (``ce_`` and their name, in UTF-8), the data is the message's value,
and the key is the subject (the job, the node), so that its events keep their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import orjson
from pydantic import ValidationError

from events.types import EVENT_TYPES, Event
from model.codec import faults_of, parse_json, show
from model.errors import Fault, ModelError

_CONTENT_TYPE = "content-type"
_PREFIX = "ce_"
_PARTITION_KEY = "partitionkey"
_INTEGERS = frozenset({"epoch"})
_DIGITS = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class KafkaMessage:
    """An event in Kafka's binary mode, in the types that a Kafka client takes and gives."""

    topic: str
    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...]


def to_json(event: Event) -> bytes:
    """Writes an event as one document (structured mode)."""
    return event.model_dump_json().encode()


def from_json(document: bytes | str) -> Event:
    """Reads an event from one document (structured mode).

    Raises:
        ModelError: ``model.json``; ``events.unknown-type``, for a type of a newer build; ``events.invalid``.
    """
    return _read(parse_json("Event", document))


def to_kafka(event: Event) -> KafkaMessage:
    """Writes an event as a Kafka message (binary mode)."""
    attributes = event.model_dump(mode="json", exclude={"data", "datacontenttype"})
    headers = [(_CONTENT_TYPE, event.datacontenttype.encode())]
    headers += [(_PREFIX + name, str(value).encode()) for name, value in attributes.items()]
    key = str(event.subject).encode()
    headers.append((_PREFIX + _PARTITION_KEY, key))
    return KafkaMessage(event.topic, key, event.data.model_dump_json().encode(), tuple(headers))


def from_kafka(value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> Event:
    """Reads an event from a Kafka message (binary mode).

    Raises:
        ModelError: ``events.not-an-event`` for a message that is no CloudEvent in binary mode, and as `from_json`.
    """
    content_type = ""
    document: dict[str, Any] = {}
    for name, raw in headers:
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise _not_an_event(f"header {name!r} is not UTF-8") from None
        if name.lower() == _CONTENT_TYPE:
            content_type = text.partition(";")[0].strip().lower()
        elif name.startswith(_PREFIX):
            key = name.removeprefix(_PREFIX)
            document[key] = int(text) if key in _INTEGERS and _DIGITS.fullmatch(text) else text
    if "specversion" not in document:
        raise _not_an_event("header 'ce_specversion' is missing")
    if content_type != "application/json":
        raise _not_an_event(f"its content type is {show(content_type)}, not 'application/json'")
    if value is None:
        raise _not_an_event("it has no value")
    document["data"] = parse_json("Event", value)
    return _read(document)


def json_schemas() -> dict[str, dict[str, Any]]:
    """The JSON Schema (2020-12) of each event as one document, by type."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {name: {**dialect, **shape.model_json_schema()} for name, shape in EVENT_TYPES.items()}


def _read(document: object) -> Event:
    kind = cast("dict[str, object]", document).get("type") if isinstance(document, dict) else None
    if not isinstance(kind, str):
        fault = Fault("type", "is missing or not a string", "Send a CloudEvent.")
        raise ModelError.of_faults("Event", [fault], code="events.invalid")
    shape = EVENT_TYPES.get(kind)
    if shape is None:
        raise ModelError(
            f"Events of type {show(kind)} are unknown to this build.",
            code="events.unknown-type",
            remedy="Skip it, or read it with a newer build.",
        )
    try:
        return shape.model_validate_json(orjson.dumps(document))
    except ValidationError as error:
        raise ModelError.of_faults("Event", faults_of(error), code="events.invalid") from None


def _not_an_event(why: str) -> ModelError:
    return ModelError(
        f"This message is no CloudEvent in binary mode: {why}.",
        code="events.not-an-event",
        remedy="Look for what else writes to this topic.",
    )
