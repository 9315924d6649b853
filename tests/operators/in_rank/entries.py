"""The entries of PyTorch's own tables, and what of them is to be run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from selection import Selection

# optim_db names none.
_OPTIMIZER_DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Task:
    """One entry in one dtype."""

    table: str
    name: str
    dtype: str
    info: Any = field(compare=False, repr=False)

    @property
    def key(self) -> str:
        return f"{self.table} {self.name} {self.dtype}"


def _entries(table: str) -> Iterator[tuple[str, Any, list[str]]]:
    if table in ("op", "foreach"):
        from torch.testing._internal import common_methods_invocations as methods

        for info in methods.op_db if table == "op" else methods.foreach_op_db:
            variant = f".{info.variant_test_name}" if info.variant_test_name else ""
            yield info.name + variant, info, [_short(d) for d in info.supported_dtypes("cpu")]
    elif table == "module":
        from torch.testing._internal.common_modules import module_db

        for info in module_db:
            yield info.name, info, [_short(d) for d in info.dtypes]
    else:
        from torch.testing._internal.common_optimizers import optim_db

        for info in optim_db:
            yield info.optim_cls.__name__, info, [*_OPTIMIZER_DTYPES, *(["complex64"] if info.supports_complex else [])]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tasks(selection: Selection) -> list[Task]:
    """Everything that `selection` asks for, dtype by dtype in the tables' order."""
    found = []
    for table in selection.tables:
        for name, info, dtypes in _entries(table):
            if selection.names and name not in selection.names:
                continue
            found += [Task(table, name, d, info) for d in dtypes if not selection.dtypes or d in selection.dtypes]
    order = {name: n for n, name in enumerate(selection.dtypes)} or {"float32": -1}
    return sorted(found, key=lambda task: (order.get(task.dtype, 0), task.dtype))


def finished(results: Path) -> set[str]:
    """Keys of the tasks that `results` holds already."""
    if not results.exists():
        return set()
    records = (json.loads(line) for line in results.read_text().splitlines())
    return {record["task"] for record in records if "task" in record}
