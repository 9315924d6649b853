"""Messages go to stderr, data to stdout; both are plain when not a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from model.units import counted

if TYPE_CHECKING:
    from proxy_runtime.shim.spec import CutReport


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 1000  # nobody's screen: nothing is to be cut short, and a row is a line
    return console


messages = _console(stderr=True)
data = _console(stderr=False)

_PARTS = ("stop", "agree", "process", "device", "volume", "write", "read", "processes", "connect", "reconnect")


def say(text: str) -> None:
    """One message line on stderr."""
    messages.print(f"ergo: {text}", markup=False)


def cut_sentence(report: CutReport) -> str:
    """One line about a cut."""
    if report.outcome in ("moved", "checkpointed", "stopped"):
        steps = sorted(set(report.steps))
        at = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"
        late = "" if report.reached_step else " (the step asked for was not reached in time)"
        checkpoint = f", checkpoint {report.checkpoint}" if report.checkpoint else ""
        down = f"down {report.ms['downtime'] / 1e3:.2f} s, " if "downtime" in report.ms else ""
        where = f" to {counted(report.devices, 'device')}" if report.devices else ""
        pending = counted(report.pending_operations, "operation")
        return f"cut at {at}{late}: {report.outcome}{where}, epoch {report.epoch}, {down}{pending} pending{checkpoint}"
    if report.outcome == "job-ended":
        return "cut: the job had ended already"
    return f"cut called off, the job runs on: {report.error}"


def cut_table(reports: list[CutReport]) -> Table:
    """All cuts of a run, times in milliseconds."""
    table = Table(title="cuts, times in ms", title_justify="left", box=SIMPLE, padding=(0, 1))
    for heading in ("cut", "outcome", "step", *_PARTS, "down"):
        table.add_column(heading, no_wrap=True)
    for index, report in enumerate(reports, 1):
        values = [f"{report.ms[part]:.0f}" if part in report.ms else "" for part in _PARTS]
        steps = "/".join(str(step) for step in sorted(set(report.steps)))
        table.add_row(str(index), report.outcome, steps, *values, f"{report.ms.get('downtime', 0):.0f}")
    return table
