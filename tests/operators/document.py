"""docs/operators.md: made from the checked-in list and the figures of the last complete runs."""

from __future__ import annotations

import collections
import json
from pathlib import Path

from tests.operators import expected
from tests.operators.outcome import Outcome

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operators.md"
FIGURES = Path(__file__).parent / "figures.json"
OTHER_KERNEL, REFUSED = "tolerance", "refused"
TABLES = {"op": "`op_db`", "foreach": "`foreach_op_db`", "module": "`module_db`", "optim": "`optim_db`"}

_HEAD = """\
# Operators

*Made by `python -m tests.operators --docs`; a test compares.*

Every entry of PyTorch's own tables of operators, modules and optimizers is run on the device of a rank and, in the
same process, directly on the kind of device that the device proxy has (a CPU). Results, gradients, second derivatives,
tangents, in-place and `out=` variants are compared **bit for bit**, and errors by type and text. Samples run a second
time with other values, so that the remembered form of a call is used, and those with numbers of their own a third time
with others: most have 0, 0.5, 1 or 2, with which different computations round alike. No native CUDA call may be made in
the rank: they are counted. Gradients are computed on one thread: with several, PyTorch itself sums the gradients of a
tensor that is used three times in an order that depends on the thread.

What differs is in `tests/operators/expected.tsv`, by entry, dtype and phase, with a reason; everything else is equal.
`make test` runs a part of it. The whole is one command, which goes on where it was broken off:

    python -m tests.operators

The last runs. *ordinary* phases: forward, backward, other values, other numbers, in-place, `out=`; *all*: besides,
reference inputs, second derivatives, forward AD, methods, inputs that are not contiguous, `out=` with strides and of
another shape, sparse layouts, and errors (in float32). Modules run in training and in evaluation, with gradients,
second derivatives and state; optimizers four steps, where there is a choice in the form chosen for CUDA tensors.
"""

_KINDS = """\
Kinds: *tolerance*: another kernel by design, within 64 units of the last place at the largest value; *refused*: an
error that names the operator and the way out, in any sample of any layout (sparse ones are among the samples); *error*,
*error_type*, *error_text*: an error that the CPU does not raise, or raises otherwise; *no_error*: the CPU raises one,
the device does not; *cpu_nan*: the CPU's result is not a number where the device's is one; *cpu_unstable*: the CPU's
result of a copy of the arguments is another one; *strides*, *metadata*, *device*: the numbers are equal, how they lie
in memory is not. At most 12 entries may be of the kind *tolerance* and at most 1 % *refused*; a test counts.
"""


def write(outcome: Outcome | None = None) -> None:
    """Writes the document; of an `outcome` of all entries the figures too."""
    if outcome is not None and not outcome.selection.names:
        _remember(outcome)
    DOCUMENT.write_text(text())


def text() -> str:
    """What the document should hold."""
    entries = expected.load()
    return "\n".join([_HEAD, *_totals(entries), _KINDS, *_by_kind(entries)])


def number_of_entries() -> int:
    """Of all tables, as the last complete runs met them."""
    figures = json.loads(FIGURES.read_text())
    tables = {key.split(" ")[0] for key in figures}
    return sum(max(f["entries"] for key, f in figures.items() if key.split(" ")[0] == table) for table in tables)


def _remember(outcome: Outcome) -> None:
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for (table, _, dtype), counts in outcome.tasks.items():
        found[f"{table} {dtype}"].update({"entries": 1, "comparisons": sum(counts.values())})
    how = {"samples": outcome.selection.cap, "phases": "all" if outcome.selection.extended else "ordinary"}
    for key, counts in found.items():
        if not outcome.selection.cap or figures.get(key, how)["samples"]:  # a complete run is not replaced by less
            figures[key] = {**counts, **how}
    FIGURES.write_text(json.dumps(dict(sorted(figures.items())), indent=1) + "\n")


def _totals(entries: list[expected.Expected]) -> list[str]:
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    columns = ("table", "dtype", "phases", "samples", "entries", "comparisons", "tolerance", "refused", "other")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for key, counts in figures.items():
        table, dtype = key.split(" ")
        kinds = collections.defaultdict(set)
        for entry in entries:
            if (entry.table, entry.dtype) == (table, dtype):
                kinds[entry.kind if entry.kind in (OTHER_KERNEL, REFUSED) else "other"].add(entry.name)
        cells = [len(kinds[kind]) or "" for kind in (OTHER_KERNEL, REFUSED, "other")]
        samples = f"at most {counts['samples']} a phase" if counts["samples"] else "all"
        row = [TABLES[table], dtype, counts["phases"], samples, counts["entries"], counts["comparisons"], *cells]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return [*lines, ""]


def _by_kind(entries: list[expected.Expected]) -> list[str]:
    lines = ["| kind | entry | phases | dtypes | reason |", "|---|---|---|---|---|"]
    rows: dict[tuple[str, str, str, str], tuple[set[str], set[str]]] = {}
    for entry in entries:
        phases, dtypes = rows.setdefault((entry.kind, entry.table, entry.name, entry.reason), (set(), set()))
        phases.add(entry.phase)
        dtypes.add(entry.dtype)
    for (kind, _, name, reason), (phases, dtypes) in sorted(rows.items()):
        row = [kind, f"`{name}`", ", ".join(sorted(phases)), ", ".join(sorted(dtypes)), reason]
        lines.append("| " + " | ".join(row) + " |")
    return [*lines, ""]
