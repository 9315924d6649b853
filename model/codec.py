"""Reads and writes the shapes of this package as JSON, and says in whole sentences what is wrong with an input."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast

import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from model.errors import Fault, ModelError

T = TypeVar("T")

# Fields whose values may be confidential: a message never repeats them.
_HIDDEN = frozenset({"environment", "secrets"})
# Fields that are one of several shapes: pydantic puts the name of the chosen shape into the path.
_CHOSEN = frozenset({"volume"})
_SHOWN_CHARACTERS = 60
_DEEPEST = 64
_MOST_VALUES = 100_000
_MOST_FAULTS = 20


def from_json(shape: type[T], data: bytes | str) -> T:
    """Reads a value of `shape` from JSON.

    Raises:
        ModelError: the text is not JSON (``model.json``), or not of this shape (``model.invalid``).
    """
    return from_value(shape, parse_json(shape.__name__, data))


def from_value(shape: type[T], value: object) -> T:
    """Reads a value of `shape` from parsed JSON or YAML: dicts, lists, strings and numbers.

    Raises:
        ModelError: it is not of this shape (``model.invalid``); the error names every fault.
    """
    try:
        # Through JSON mode: there an array is a tuple and a string is an enum's member, but "1" is not 1.
        return adapter(shape).validate_json(as_json(shape.__name__, value), strict=True)
    except ValidationError as error:
        names = {shape.__name__: field_names(shape)}
        raise ModelError.of_faults(
            shape.__name__, faults_of(error, names[shape.__name__]), code="model.invalid"
        ) from None


def to_json(value: object) -> bytes:
    """Writes a value of one of our shapes; `from_json` with its type reads it back."""
    return adapter(type(value)).dump_json(value, by_alias=True)


def json_schema(shape: type[object]) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a shape."""
    schema = adapter(shape).json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


@cache
def adapter(shape: type[T]) -> TypeAdapter[T]:
    """The validator of a shape, built once."""
    return TypeAdapter(shape)


def parse_json(subject: str, data: bytes | str) -> object:
    """Parses JSON text.

    Raises:
        ModelError: it is not JSON (``model.json``).
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ModelError(
            f"{subject}: line {error.lineno}, column {error.colno} is not JSON ({error.msg.split(':')[0]}).",
            code="model.json",
            remedy="Correct it there.",
        ) from None


def as_json(subject: str, value: object) -> bytes:
    """Writes parsed JSON or YAML as JSON text.

    Raises:
        ModelError: it holds something that JSON does not have, such as a date (``model.json``).
    """
    try:
        return orjson.dumps(value)
    except TypeError as error:
        raise ModelError(
            f"{subject} holds a value that JSON does not have ({error}).",
            code="model.json",
            remedy="Write it as a string, in quotes, or as a number that fits.",
        ) from None


def beyond_json(value: object) -> list[Fault]:
    """What of parsed YAML JSON does not have, or would silently be another value in it, with its path.

    Infinite numbers and those that are none become null in JSON; values that name each other never end.
    """
    faults: list[Fault] = []
    left = [_MOST_VALUES]
    _beyond_json(value, (), left, faults)
    if left[0] < 0:
        faults.append(Fault("the whole", f"has more than {_MOST_VALUES:,} values", "Make it smaller."))
    return faults


def _beyond_json(value: object, path: tuple[int | str, ...], left: list[int], faults: list[Fault]) -> None:
    def fault(what: str, remedy: str) -> None:
        faults.append(Fault(_path(path), what, remedy))

    left[0] -= 1
    if left[0] < 0 or len(faults) > _MOST_FAULTS:
        return
    if len(path) > _DEEPEST:
        fault(f"is nested more than {_DEEPEST} deep", "Nothing of a spec is.")
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            if isinstance(key, str):
                _beyond_json(key, (*path, ascii(key)[1:-1]), left, faults)
                _beyond_json(item, (*path, key), left, faults)
            else:
                fault(f"has a field that is called {show(key)}, which is no string", "Write its name in quotes.")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(cast("Sequence[object]", value)):
            _beyond_json(item, (*path, index), left, faults)
    elif isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            fault("is not text in UTF-8", "Write it as such.")
    elif isinstance(value, float):
        if not math.isfinite(value):
            fault(f"is {value}, but must be finite", "Leave it out, or write null where nothing is meant.")
    elif isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            fault("is a number of more than 64 bits", "Write a smaller one.")
    elif value is not None:
        fault(f"is a {type(value).__name__}, which JSON does not have", "Write it as a string, in quotes.")


def field_names(shape: type[object]) -> tuple[str, ...]:
    """The names of a shape's fields as they are written in JSON."""
    properties = cast("Mapping[str, object]", json_schema(shape).get("properties", {}))
    return tuple(properties)


def faults_of(error: ValidationError, known: Sequence[str] = ()) -> tuple[Fault, ...]:
    """Turns the findings of pydantic into sentences.

    Args:
        error: what pydantic raised.
        known: names of the fields at the top, from which a misspelt one is guessed.
    """
    findings = error.errors(include_url=False)
    # A list with a faulty item is also called too short, because pydantic counts the sound ones.
    with_items = {finding["loc"][:-1] for finding in findings if finding["loc"] and isinstance(finding["loc"][-1], int)}
    return tuple(
        fault
        for finding in findings
        if not (finding["type"] == "too_short" and finding["loc"] in with_items)
        # A default that follows from fields of which one is faulty: that one is told.
        and finding["type"] != "default_factory_not_called"
        for fault in _faults(finding, known)
    )


def show(value: object) -> str:
    """A value, short enough for a sentence."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 4]} ..."


def one_of(values: Iterable[object]) -> str:
    """A choice, in words: ``a, b or c``."""
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def _faults(finding: ErrorDetails, known: Sequence[str]) -> Iterator[Fault]:
    cause = finding.get("ctx", {}).get("error")
    if isinstance(cause, ModelError) and cause.faults:
        for fault in cause.faults:
            yield Fault(_path((*finding["loc"], fault.where)), fault.what, fault.remedy)
    else:
        yield _fault(finding, known)


def _fault(finding: ErrorDetails, known: Sequence[str]) -> Fault:
    where = _path(finding["loc"])
    kind = finding["type"]
    context = finding.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, ModelError):
        message = cause.message[:-1] if cause.message.endswith(".") else cause.message
        return Fault(where, f"is refused: {message}", cause.remedy or "Correct it.")
    if kind == "missing":
        return Fault(where, "is missing", "Add it.")
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        guess = difflib.get_close_matches(str(finding["loc"][-1]), known, 1) if len(finding["loc"]) == 1 else []
        remedy = f"Did you mean `{guess[0]}`?" if guess else "Remove it, or correct its name."
        return Fault(where, "is not a known field", remedy)
    hidden = bool(finding["loc"]) and finding["loc"][0] in _HIDDEN
    value = "" if hidden else f"is {show(finding['input'])}, but "
    rule, remedy = _RULES.get(kind, _other)(finding, context)
    return Fault(where, f"{value}{rule}", remedy)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for index, part in enumerate(location):
        if part == "[key]":  # pydantic's mark for the name of an entry, which the part before gives
            continue
        if index and location[index - 1] in _CHOSEN and len(location) > index + 1:
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or "the whole"


def _other(finding: ErrorDetails, context: Mapping[str, Any]) -> tuple[str, str]:
    text = finding["msg"].removeprefix("Value error, ")
    for start, words in (("Input should be ", "must be "), ("Input should ", "must "), ("String should ", "must ")):
        if text.startswith(start):
            text = words + text.removeprefix(start)
    return text, "Correct it."


_Rule = Callable[[ErrorDetails, Mapping[str, Any]], tuple[str, str]]


def _bound(words: str, key: str) -> _Rule:
    def rule(finding: ErrorDetails, context: Mapping[str, Any]) -> tuple[str, str]:
        return f"must be {words} {context[key]}", f"Set it to {words} {context[key]}."

    return rule


def _length(words: str, key: str) -> _Rule:
    def rule(finding: ErrorDetails, context: Mapping[str, Any]) -> tuple[str, str]:
        plural = "" if context[key] == 1 else "s"
        unit = "character" if finding["type"].startswith("string") else "item"
        return f"must have {words} {context[key]} {unit}{plural}", f"Give it {words} {context[key]} {unit}{plural}."

    return rule


def _kind(noun: str) -> _Rule:
    return lambda finding, context: (f"must be {noun}", f"Write {noun}.")


def _choice(finding: ErrorDetails, context: Mapping[str, Any]) -> tuple[str, str]:
    choices: str = context.get("expected") or context.get("expected_tags") or "one of the known values"
    return f"must be {choices}", "Choose one of these."


def _tag(finding: ErrorDetails, context: Mapping[str, Any]) -> tuple[str, str]:
    tag = str(context.get("discriminator", "kind")).strip("'")
    return f"must have the field `{tag}`", "Add it."


_RULES: dict[str, _Rule] = {
    "greater_than_equal": _bound("at least", "ge"),
    "greater_than": _bound("more than", "gt"),
    "less_than_equal": _bound("at most", "le"),
    "less_than": _bound("less than", "lt"),
    "too_short": _length("at least", "min_length"),
    "too_long": _length("at most", "max_length"),
    "string_too_short": _length("at least", "min_length"),
    "string_too_long": _length("at most", "max_length"),
    "int_type": _kind("an integer"),
    "int_from_float": _kind("an integer"),
    "float_type": _kind("a number"),
    "bool_type": _kind("true or false"),
    "string_type": _kind("a string"),
    "dict_type": _kind("a mapping"),
    "list_type": _kind("a list"),
    "tuple_type": _kind("a list"),
    "model_type": _kind("a mapping of fields"),
    "dataclass_type": _kind("a mapping of fields"),
    "literal_error": _choice,
    "enum": _choice,
    "union_tag_invalid": _choice,
    "union_tag_not_found": _tag,
}
