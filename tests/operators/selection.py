"""Which entries of PyTorch's tables are run, and how many of their samples."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

TABLES = ("op", "foreach", "module", "optim")


@dataclass(frozen=True, slots=True)
class Selection:
    """What is run.

    Attributes:
        tables: of `TABLES`.
        dtypes: names; empty for every one that an entry names.
        names: entries; empty for all.
        cap: samples an entry, dtype and phase; 0 for all.
        extended: whether the phases beyond the ordinary ones are run too.
    """

    tables: tuple[str, ...] = TABLES
    dtypes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    cap: int = 0
    extended: bool = False

    def text(self) -> str:
        return json.dumps(asdict(self))


def parse(text: str) -> Selection:
    raw = json.loads(text)
    return Selection(**{name: tuple(v) if isinstance(v, list) else v for name, v in raw.items()})
