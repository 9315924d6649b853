"""What the demo prints at the end: the comparison, and the time line with downtimes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from model.control import JobView, TransitionView


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
    """Prints decisions and transitions of all jobs in the order of their time, with downtimes and their parts."""
    lines: list[tuple[float, str, str, str]] = []
    began = min(view.submitted_at for view in views)
    for view in views:
        lines += [
            ((decision.time - began).total_seconds(), view.id, f"decision: {decision.action}", decision.reason)
            for decision in view.decisions
        ]
        for transition in view.transitions:
            where = ", ".join(dict.fromkeys(device.node.name for device in transition.devices))
            what = f"{transition.phase} on {where}" if where else str(transition.phase)
            at = (transition.time - began).total_seconds()
            lines.append((at, view.id, what, _down(transition)))
    console.print("[bold]what happened[/] (seconds since the first job was submitted)")
    width = max(len(line[1]) for line in lines)
    for at, job, what, why in sorted(lines, key=lambda line: line[0]):
        console.print(f"{at:7.1f}  {job:{width}}  {what:28}  {why}", markup=False)


def _down(transition: TransitionView) -> str:
    if transition.down_ms is None:
        return ""
    parts = transition.parts_ms or {}
    whole = {name: value for name, value in parts.items() if "." not in name}
    within = {name: value for name, value in parts.items() if "." in name and value >= 10.0}
    text = f"stopped for {transition.down_ms / 1e3:.2f} s: {_listed(whole)}"
    return f"{text}; within these: {_listed(within)}" if within else text


def _listed(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {value / 1e3:.2f}" for name, value in parts.items())


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
