"""`ergo show` and `ergo explain`: one job, and why it is where it is."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from cli.console import data, say
from cli.fleet.options import AnyJob, AsJson, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from cli.fleet.client import Fleet
    from model.control import DecisionView, JobView, TransitionView
    from model.records import NodeRecord


_TOLD_MS, _TOLD_PARTS = 10.0, 5


def register(app: typer.Typer) -> None:
    """Adds what this file defines to the command line."""
    app.command("show", short_help="One job: state, time line, decisions, checkpoints.")(show)
    app.command("explain", short_help="Why a job runs where it runs, or does not run.")(explain)


def show(job: AnyJob, as_json: AsJson = False) -> None:
    """Shows all that is known of JOB: where it is, what happened to it, what was decided about it, its checkpoints.

    Beside what has happened stands for how long it was stopped for that, beside decisions why they were made.
    Steps are those of all its optimizers together: a script with two that take turns has two an iteration.
    """
    from cli.fleet.client import call

    async def main(fleet: Fleet) -> None:
        view, nodes, status = await _look(fleet, job)
        address = fleet.ui(job)
        if as_json:
            print_json(to_json(view, nodes, status, address))
            return
        _print(view, nodes, status, address)

    call(main)


def explain(job: AnyJob, as_json: AsJson = False) -> None:
    """Tells in sentences why JOB is where it is: what it waits for, who decided so, and when.

    And, where a node says something of it that the scheduler does not believe, what.
    """
    from cli.fleet import words
    from cli.fleet.client import call
    from cli.fleet.operate import state_of

    async def main(fleet: Fleet) -> None:
        view, found, state = await asyncio.gather(fleet.view(job), fleet.explain(job), state_of(fleet))
        against = [item for item in state.findings if item.counts and item.job == view.id]
        if as_json:
            fields = [{"time": one.time, "action": one.action, "reason": one.reason} for one in found]
            print_json(
                {
                    "id": view.id,
                    "phase": view.phase,
                    "waiting": view.waiting,
                    "decisions": fields,
                    "contradictions": [
                        {"kind": one.kind, "node": one.node.name, "since": one.since, "text": one.text}
                        for one in against
                    ],
                }
            )
            return
        for text in sentences(view, found):
            data.print(text, markup=False)
        for one in against:
            data.print(f"Since {words.clock(one.since)} UTC nodes and the scheduler differ: {one.text}.", markup=False)

    call(main)


def sentences(view: JobView, decisions: Sequence[DecisionView]) -> list[str]:
    """Where a job is and why: first how it stands, then what was decided about it, the newest last."""
    from cli.fleet import words

    if view.placement:
        where = f"{view.phase} on {devices(view.placement)}, in epoch {int(view.epoch)}"
    else:
        where = f"{view.phase}{' and held by a person until `ergo resume`' if view.held else ''}"
    found = [f"Job {view.id} ({view.tier}, {words.ranks(view)}) is {where}."]
    if view.waiting and not view.phase.ended:
        found.append(f"It waits: {view.waiting}")
    if view.failure:
        found.append(view.failure)
    told = [one for one in decisions if one.action != "waits"]
    if not told:
        found.append("Nothing has been decided about it yet.")
    found += [f"{words.clock(one.time)} UTC  {one.action}: {one.reason}" for one in told]
    return found


def live(view: JobView, nodes: Sequence[NodeRecord]) -> int:
    """The step that the job has reached, as far as anybody has told."""
    from cli.fleet.overview import live_step

    return max(int(view.step), int(live_step(view.id, view.epoch, nodes) or 0))


def to_json(view: JobView, nodes: Sequence[NodeRecord], status: str, address: str) -> dict[str, Any]:
    """The documented fields: those of the view, with the newest step, and what the engine says of the workflow."""
    import orjson

    from model.codec import to_json as encode

    fields = orjson.loads(encode(view))
    return {**fields, "step": live(view, nodes), "workflow_status": status.lower(), "workflow_url": address}


def timeline(transitions: Sequence[TransitionView]) -> Table:
    """What has happened, with the time that no rank ran and its parts."""
    from cli.fleet import words

    made = words.table(
        "TIME (UTC)", "PHASE", "EPOCH", "STEP", "WHERE", "STOPPED FOR", "WHY",
        right=("EPOCH", "STEP", "STOPPED FOR"), fold=("WHY",),
    )  # fmt: skip
    for change in transitions:
        stopped = "" if change.down_ms is None else words.milliseconds(change.down_ms)
        made.add_row(
            words.clock(change.time),
            words.phase(change.phase),
            str(change.epoch) if change.epoch else "",
            str(change.step) if change.epoch else "",
            devices(change.devices),
            stopped,
            f"{change.reason}{parts(change.parts_ms)}",
        )
    return made


def parts(parts_ms: dict[str, float] | None) -> str:
    """The parts of a downtime, the longest first: those that count, without what they are made of (`node.read`)."""
    from cli.fleet import words

    whole = {name: value for name, value in (parts_ms or {}).items() if "." not in name and value >= _TOLD_MS}
    if not whole:
        return ""
    longest = sorted(whole.items(), key=lambda item: -item[1])[:_TOLD_PARTS]
    return f" ({', '.join(f'{name} {words.milliseconds(value)}' for name, value in longest)})"


def devices(placement: Sequence[Any]) -> str:
    """``node-1: cpu-0 cpu-1, node-2: cpu-0``."""
    by_node: dict[str, list[str]] = {}
    for device in placement:
        by_node.setdefault(device.node.name, []).append("/".join(device.path))
    return ", ".join(f"{node}: {' '.join(names)}" for node, names in by_node.items())


async def _look(fleet: Fleet, job: str) -> tuple[JobView, list[NodeRecord], str]:
    from proxy_runtime.errors import ErgoError

    async def nodes() -> list[NodeRecord]:
        try:
            return await fleet.nodes()
        except ErgoError as error:
            say(f"steps are those of the last transition: {error}")
            return []

    view, description, known = await asyncio.gather(fleet.view(job), fleet.describe(job), nodes())
    return view, known, description.status.name if description.status else "UNKNOWN"


def _print(view: JobView, nodes: Sequence[NodeRecord], status: str, address: str) -> None:
    from rich.table import Table

    from cli.fleet import words

    now = datetime.now(UTC)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")

    def fact(name: str, value: Any) -> None:
        if value not in ("", None):
            facts.add_row(name, value)

    fact("job", view.id)
    fact("name", view.name)
    fact("tenant, tier", f"{view.tenant}, {view.tier}")
    fact("phase", words.phase(view.phase, held=view.held))
    if status not in ("RUNNING", "CONTINUED_AS_NEW", "COMPLETED") and not view.phase.ended:
        fact("workflow", f"{status.lower()} from outside; the job does not go on")
    fact("waiting for", view.waiting)
    fact("failure", view.failure)
    fact("exit code", None if view.exit_code is None else str(view.exit_code))
    ranks = "its own" if view.pack == "node" else str(view.ranks)
    fact("ranks", f"{ranks} on {words.counted(view.width, 'device')}" if view.width else ranks)
    fact("where", devices(view.placement))
    fact("epoch, step", f"{int(view.epoch)}, {live(view, nodes)}")
    fact(
        "submitted",
        f"{words.clock(view.submitted_at)} UTC, {words.duration((now - view.submitted_at).total_seconds())} ago",
    )
    fact("GPU fraction", None if view.gpu_fraction is None else f"{view.gpu_fraction:.1%}")
    counts = (view.preemptions, view.moves, view.resizes, view.recoveries)
    fact("stopped, moved, resized, recovered", f"{', '.join(map(str, counts))} times")
    fact("events to publish", str(view.unpublished_events) if view.unpublished_events else None)
    fact("Temporal UI", address)
    print_table(facts)
    _section("Time line", timeline(view.transitions), len(view.transitions))
    _section("Decisions", _decisions(view.decisions), len(view.decisions))
    _section("Checkpoints", _checkpoints(view), len(view.checkpoints))


def _section(title: str, content: Table, rows: int) -> None:
    if rows:
        data.print()
        data.print(title, style="bold")
        print_table(content)


def _decisions(decisions: Sequence[DecisionView]) -> Table:
    from cli.fleet import words

    made = words.table("TIME (UTC)", "DECISION", "WHY", fold=("WHY",))
    for decision in decisions:
        made.add_row(words.clock(decision.time), decision.action, decision.reason)
    return made


def _checkpoints(view: JobView) -> Table:
    from cli.fleet import words
    from model.units import size_words

    made = words.table(
        "TIME (UTC)", "CHECKPOINT", "KIND", "STEP", "STORED", "OF", "STOPPED FOR",
        right=("STEP", "STORED", "OF", "STOPPED FOR"),
    )  # fmt: skip
    for checkpoint in view.checkpoints:
        made.add_row(
            words.clock(checkpoint.time),
            checkpoint.id,
            checkpoint.kind,
            str(checkpoint.step),
            size_words(checkpoint.stored_bytes),
            size_words(checkpoint.total_bytes),
            words.milliseconds(checkpoint.stopped_ms),
        )
    return made
