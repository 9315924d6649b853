"""Words that sentences about decisions are made of."""

from __future__ import annotations

from collections.abc import Iterable

from model.units import counted


def devices(count: int) -> str:
    """A number of devices, in words."""
    return counted(count, "device")


def are(free: int) -> str:
    """``1 is``, ``2 are``."""
    return f"{free} {'is' if free == 1 else 'are'}"


def listed(words: Iterable[object], most: int = 4, last: str = "and", nothing: str = "none") -> str:
    """``a``, ``a and b``, ``a, b, c, d and 3 more``; `nothing` of no words."""
    texts = [str(word) for word in words]
    if len(texts) > most:
        texts = [*texts[:most], f"{len(texts) - most} more"]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {last} {texts[-1]}" if texts else nothing
