"""What the dataclasses of this package have in common."""

from __future__ import annotations

from typing import ClassVar

from pydantic import ConfigDict


class Shape:
    """A frozen, slotted dataclass that pydantic reads from JSON. An unknown field is an error."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
