"""What a run found."""

from __future__ import annotations

import collections
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.operators.selection import Selection

# Phases that only an extended run has.
EXTENDED = frozenset(
    {
        *("reference", "noncontiguous", "method", "out_strided", "out_resized", "errors"),
        *("double_backward", "forward_ad"),
        *("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"),
    }
)


class Finding(NamedTuple):
    """One way in which an entry differs, at its first sample."""

    table: str
    name: str
    dtype: str
    phase: str
    kind: str
    sample: int
    text: str

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        return self[:5]


@dataclass(slots=True)
class Outcome:
    """The results of a run.

    Attributes:
        tasks: (table, name, dtype) -> phase -> comparisons.
        findings: what differed.
    """

    selection: Selection
    tasks: dict[tuple[str, str, str], dict[str, int]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    cpu_s: float = 0.0

    def covers(self, table: str, name: str, dtype: str, phase: str, sample: int) -> bool:
        """Whether this run would have met a difference that first shows in that phase and sample."""
        if (table, name, dtype) not in self.tasks or (phase in EXTENDED and not self.selection.extended):
            return False
        return not self.selection.cap or sample < self.selection.cap

    def summary(self) -> str:
        comparisons = sum(sum(counts.values()) for counts in self.tasks.values())
        kinds = collections.Counter(finding.kind for finding in self.findings)
        listed = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or "no difference"
        entries = len({key[:2] for key in self.tasks})
        return (
            f"{entries} entries, {len(self.tasks)} with dtype, {comparisons} comparisons: {listed}; "
            f"{self.cpu_s:.0f} s of CPU time in the rank"
        )


def read(results: Path, selection: Selection) -> Outcome:
    """Reads the part of `results` that `selection` asked for."""
    outcome = Outcome(selection)
    for line in results.read_text().splitlines():
        record = json.loads(line)
        table, name, dtype = record["task"].split(" ")
        if (
            table not in selection.tables
            or (selection.names and name not in selection.names)
            or (selection.dtypes and dtype not in selection.dtypes)
        ):
            continue
        outcome.tasks[table, name, dtype] = record["counts"]
        outcome.cpu_s += record.get("cpu_s", 0.0)
        for phase, kind, sample, text, _ in record["failures"]:
            outcome.findings.append(Finding(table, name, dtype, phase, kind, sample, text))
    return outcome
