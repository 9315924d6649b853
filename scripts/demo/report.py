"""What the demo prints at the end: the comparison, and the time line with downtimes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from model.control import JobView


def compare(console: Console, view: JobView, ranks: int, steps: int, touched: Path, untouched: Path) -> bool:
    """Prints the sha256 pairs of every rank's losses and of the final weights; returns whether all are equal."""
    table = Table("", "untouched", "in the fleet", "equal", title=f"{view.id}: sha256", title_justify="left")
    one, other = _digests(untouched, ranks, steps), _digests(touched, ranks, steps)
    for name, value in one.items():
        same = value == other[name]
        table.add_row(name, value[:24], other[name][:24], "yes" if same else "[red]NO[/]")
    console.print(table)
    return one == other


def time_line(console: Console, views: Sequence[JobView]) -> None:
    """Prints decisions and transitions of all jobs in the order of their time."""
    rows: list[tuple[float, str, str, str, str, str]] = []
    began = min(view.submitted_at for view in views)
    for view in views:
        for decision in view.decisions:
            at = (decision.time - began).total_seconds()
            rows.append((at, view.id, f"decided: {decision.action}", "", decision.reason, ""))
        for transition in view.transitions:
            at = (transition.time - began).total_seconds()
            where = ", ".join(dict.fromkeys(device.node.name for device in transition.devices))
            rows.append((at, view.id, transition.phase, where, transition.reason, _down(transition)))
    table = Table("s", "job", "", "on", "why", "down", title="what happened", title_justify="left")
    for at, *cells in sorted(rows, key=lambda row: row[0]):
        table.add_row(f"{at:.1f}", *cells)
    console.print(table)


def _down(transition: object) -> str:
    down = getattr(transition, "down_ms", None)
    if down is None:
        return ""
    parts = getattr(transition, "parts_ms", None) or {}
    listed = ", ".join(f"{name} {value / 1e3:.2f}" for name, value in parts.items() if value >= 10.0)
    return f"{down / 1e3:.2f} s ({listed})" if listed else f"{down / 1e3:.2f} s"


def _digests(directory: Path, ranks: int, steps: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for rank in range(ranks):
        result = json.loads((directory / f"losses-rank{rank}.json").read_text())
        losses = result["losses"]
        if len(losses) != steps:
            raise ValueError(f"rank {rank} has {len(losses)} losses, not {steps}")
        found[f"losses of rank {rank}"] = hashlib.sha256("\n".join(losses).encode()).hexdigest()
        found[f"weights, as rank {rank} has them"] = str(result["weights_sha256"])
    found["weights.pt"] = hashlib.sha256((directory / "weights.pt").read_bytes()).hexdigest()
    return found
