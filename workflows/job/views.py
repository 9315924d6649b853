"""What people see of a job: the queries, and the page in the Temporal UI."""

from __future__ import annotations

from temporalio import workflow

from model.control import JobView
from model.units import counted
from workflows.job.core import Job

_SHOWN = 5


def view(job: Job) -> JobView:
    """The job as it stands."""
    state, spec, placement = job.state, job.spec, job.state.placement
    elapsed_ms = (workflow.now() - state.submitted_at).total_seconds() * 1000
    asked_ms = elapsed_ms * spec.world_size
    return JobView(
        id=state.job,
        name=spec.name,
        tenant=spec.tenant,
        tier=spec.tier,
        ranks=spec.ranks,
        phase=state.phase,
        held=state.held,
        step=state.step,
        epoch=state.epoch,
        width=job.width,
        placement=placement.devices if placement else (),
        device_of_rank=placement.device_of_rank if placement else (),
        submitted_at=state.submitted_at,
        gpu_fraction=round(min(1.0, job.delivered_ms() / asked_ms), 4) if elapsed_ms >= 1000 else None,
        preemptions=state.preemptions,
        moves=state.moves,
        recoveries=state.recoveries,
        checkpoints=tuple(state.checkpoints),
        decisions=tuple(state.decisions),
        transitions=tuple(state.transitions),
        waiting=state.waiting,
        exit_code=state.exit_code,
        failure=state.failure,
        final=state.final,
        unpublished_events=state.outbox.unpublished,
        pack=spec.pack,
        resizes=state.resizes,
    )


def details(job: Job) -> str:
    """The job as a page of Markdown."""
    state, placement = job.state, job.state.placement
    held = " (held by a person)" if state.held else ""
    rows = [("phase", f"**{state.phase}**{held}")]
    if job.operation:
        rows.append(("under way", job.operation))
    if state.waiting:
        rows.append(("waits", state.waiting))
    if placement is not None:
        rows.append(("placement", ", ".join(str(device) for device in placement.devices)))
        if placement.width < job.spec.world_size:
            rows.append(("width", f"{counted(placement.width, 'device')} for {job.spec.world_size} ranks"))
    rows += [
        ("step", str(state.step)),
        ("epoch", str(state.epoch)),
        ("tier", f"{job.spec.tier} (tenant {job.spec.tenant})"),
        (
            "counts",
            ", ".join(f"{getattr(state, what)} {what}" for what in ("preemptions", "moves", "resizes", "recoveries")),
        ),
    ]
    if state.checkpoints:
        last = state.checkpoints[-1]
        rows.append(("checkpoint", f"{last.id} at step {last.step}, {last.time:%H:%M:%S} UTC"))
    if state.outbox.unpublished > 1:
        rows.append(("events not published yet", str(state.outbox.unpublished)))
    if state.failure:
        rows.append(("failure", state.failure))
    lines = ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows)]
    if state.decisions:
        lines += ["", "**Decisions**", "", "| time | what | why |", "|---|---|---|"]
        lines += [
            f"| {decision.time:%H:%M:%S} | {decision.action} | {_cell(decision.reason)} |"
            for decision in reversed(state.decisions[-_SHOWN:])
        ]
    if state.transitions:
        lines += ["", "**Transitions**", "", "| time | phase | why | down ms |", "|---|---|---|---|"]
        lines += [
            f"| {t.time:%H:%M:%S} | {t.phase} | {_cell(t.reason)} | {'' if t.down_ms is None else round(t.down_ms)} |"
            for t in reversed(state.transitions[-_SHOWN:])
        ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text that stays in its cell of a table."""
    return text.replace("|", "\\|").replace("\n", "<br>")[:1000]
