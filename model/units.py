"""Sizes and counts as people write them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

_PATTERN = r"([0-9]+)\s*(?:([KMGTkmgt])[Ii]?[Bb]?|[Bb])?"
_END = 1 << 63
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_bytes(value: Any) -> Any:
    """Reads ``16GiB`` as a number of bytes; leaves what is not a string to the next validator.

    ``16 gib``, ``16GB`` and ``16G`` are the same: every unit is a power of 1024.

    Raises:
        ValueError: a string of another form.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(_PATTERN, value)
    if match is None:
        raise ValueError("must be a number of bytes, or one with KiB, MiB, GiB or TiB, such as '16GiB'")
    size = int(match[1]) << 10 * " KMGT".index((match[2] or " ").upper())
    if size >= _END:
        raise ValueError("must be less than 2**63 bytes")
    return size


Bytes = Annotated[
    int,
    Field(ge=1, lt=_END),
    BeforeValidator(parse_bytes),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "exclusiveMaximum": _END},
                {"type": "string", "pattern": f"^{_PATTERN}$"},
            ]
        }
    ),
]
"""A size in bytes of at least 1; in a file also a string such as ``16GiB``."""


def size_words(count: float) -> str:
    """Bytes in powers of 1024: ``3.2 MiB``."""
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def counted(number: float, noun: str, plural: str = "") -> str:
    """``1 node``, ``2 nodes``, ``1.5 nodes``."""
    text = str(number) if isinstance(number, int) else f"{number:g}"
    return f"{text} {noun if number == 1 else plural or noun + 's'}"
