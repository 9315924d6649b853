"""The checked-in list of what differs, and why.

One line a difference, tab-separated: table, entry, dtype, phase, kind, first sample, reason. Everything else is equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.operators.outcome import Outcome

LIST = Path(__file__).parent / "expected.tsv"
HEAD = "# table\tentry\tdtype\tphase\tkind\tfirst sample\treason"
UNEXPLAINED = "?"


class Expected(NamedTuple):
    """A difference that is known."""

    table: str
    name: str
    dtype: str
    phase: str
    kind: str
    sample: int
    reason: str

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        return self[:5]


def load(path: Path = LIST) -> list[Expected]:
    lines = [line.split("\t") for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return [
        Expected(table, name, dtype, phase, kind, int(sample), reason)
        for table, name, dtype, phase, kind, sample, reason in lines
    ]


def compare(expected: list[Expected], outcome: Outcome) -> list[str]:
    """What is new, and what is in the list and does not happen any more; empty if the list holds."""
    known = {entry.key for entry in expected}
    found = {finding.key for finding in outcome.findings}
    new = [
        f"new: {' '.join(finding.key)}: sample {finding.sample}: {finding.text}"
        for finding in outcome.findings
        if finding.key not in known
    ]
    gone = [
        f"gone: {' '.join(entry.key)}: take it off the list"
        for entry in expected
        if entry.key not in found and outcome.covers(entry.table, entry.name, entry.dtype, entry.phase, entry.sample)
    ]
    return new + gone


def update(outcome: Outcome, path: Path = LIST) -> None:
    """Writes the findings into the list. Reasons are kept; a new line gets that of the same entry and kind, or "?"."""
    old = load(path) if path.exists() else []
    reasons = {entry.key: entry.reason for entry in old}
    similar = {(entry.table, entry.name, entry.kind): entry.reason for entry in old}
    kept = [e for e in old if not outcome.covers(e.table, e.name, e.dtype, e.phase, e.sample)]
    for finding in outcome.findings:
        reason = reasons.get(finding.key) or similar.get((finding.table, finding.name, finding.kind), UNEXPLAINED)
        kept.append(Expected(*finding.key, finding.sample, reason))
    lines = ["\t".join(map(str, entry)) for entry in sorted(kept)]
    path.write_text("\n".join([HEAD, *lines]) + "\n")
