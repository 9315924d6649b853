"""Commands on the jobs that `ergo run` has started on this machine, from another terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.table import Table

from cli.console import cut_sentence, data, say
from cli.usage import LAST_STEP, MOST_RANKS
from proxy_runtime.errors import ErgoError

if TYPE_CHECKING:
    from proxy_runtime.shim.client import ShimClient
    from proxy_runtime.shim.spec import CutReport, CutRequest

JobArgument = Annotated[
    str | None, typer.Argument(metavar="[JOB]", help="Job id; may be left out when only one is running.")
]
StepOption = Annotated[
    int | None, typer.Option("--at-step", min=0, max=LAST_STEP, help="Prefer the moment when this step is done.")
]


def register(app: typer.Typer) -> None:
    """Adds what this file defines to the command line."""
    local = typer.Typer(
        help="Jobs that `ergo run` has started on this machine, from another terminal.", no_args_is_help=True
    )
    app.add_typer(local, name="local", short_help="Jobs of `ergo run` on this machine.")
    local.command("ps", short_help="Jobs of `ergo run` on this machine.")(ps)
    local.command("cut", short_help="Cut a running job: checkpoint, end, restore.")(cut)
    local.command("checkpoint", short_help="Checkpoint a running job; it goes on.")(checkpoint)
    local.command("resize", short_help="Run a job on fewer or more devices.")(resize)
    local.command("suspend", short_help="Checkpoint a running job and end it; `ergo run --restore` continues it.")(
        suspend
    )
    local.command("cancel", short_help="End a running job.")(cancel)


def ps(as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """Lists the jobs that run on this machine under `ergo run`."""
    from proxy_runtime.shim.client import ShimClient, running_jobs

    rows: list[dict[str, Any]] = []
    for layout in running_jobs():
        client = ShimClient(layout)
        try:
            status = client.status()
        except ErgoError:
            continue
        finally:
            client.close()
        rows.append({"id": layout.job_id, **{key: value for key, value in status.items() if key != "ok"}})
    if as_json:
        sys.stdout.write(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    table = Table("job", "epoch", "step", "ranks", "devices", box=None)
    for row in rows:
        steps = "/".join(str(step) for step in sorted(set(row.get("step", []))))
        ranks, width = len(row.get("placement", [])), row.get("width", 0)
        table.add_row(row["id"], str(row["epoch"]), steps, str(ranks), str(width))
    data.print(table)


def cut(
    job: JobArgument = None,
    at_step: StepOption = None,
    devices: Annotated[int | None, typer.Option(help="Continue on this many devices.", min=1, max=MOST_RANKS)] = None,
) -> None:
    """Checkpoints JOB, ends all its processes and restores them from the checkpoint, as on another node."""
    from proxy_runtime.job import require_width
    from proxy_runtime.shim.spec import CutRequest

    client = _client(job)
    if devices is not None:
        status = client.status()
        ranks = len(status.get("placement", ()))
        if devices < ranks == len(status.get("rank_pids", ())):  # all else the job itself refuses
            require_width(ranks, devices)
    _finish(client.cut(CutRequest(at_step=at_step, devices=devices)))


def checkpoint(job: JobArgument = None, at_step: StepOption = None) -> None:
    """Takes a checkpoint of JOB, which goes on meanwhile."""
    from proxy_runtime.shim.spec import CutRequest

    _cut(job, CutRequest(move=False, at_step=at_step))


def resize(
    devices: Annotated[
        int, typer.Option("--devices", min=1, max=MOST_RANKS, metavar="K", help="On how many; K divides the ranks.")
    ],
    job: JobArgument = None,
    at_step: StepOption = None,
) -> None:
    """Has JOB go on on K devices: on fewer, several of its ranks share one; its numbers stay the same.

    Its processes run on, and no checkpoint is taken.
    """
    from model.units import counted
    from proxy_runtime.job import require_width
    from proxy_runtime.shim.spec import CutRequest, RunError

    client = _client(job)
    status = client.status()
    require_width(len(status.get("placement", ())), devices)
    if devices == status.get("width"):
        raise RunError(f"the job runs on {counted(devices, 'device')} already.", code="run.bad-width")
    _finish(client.cut(CutRequest(at_step=at_step, devices=devices, keep_processes=True)))


def suspend(job: JobArgument = None, at_step: StepOption = None) -> None:
    """Checkpoints JOB and ends it."""
    from proxy_runtime.shim.spec import CutRequest

    _cut(job, CutRequest(stop=True, at_step=at_step))


def cancel(job: JobArgument = None) -> None:
    """Ends JOB and everything that belongs to it."""
    client = _client(job)
    client.end(130, "the job was cancelled.")
    say(f"job {client.layout.job_id} was cancelled")


def _cut(job: str | None, request: CutRequest) -> None:
    _finish(_client(job).cut(request))


def _finish(report: CutReport) -> None:
    say(cut_sentence(report))
    raise typer.Exit(0 if report.outcome in ("moved", "checkpointed", "stopped") else 1)


def _client(job: str | None) -> ShimClient:
    from proxy_runtime.shim.client import ShimClient, running_jobs
    from proxy_runtime.shim.spec import RunError

    layouts = running_jobs()
    if job is not None:
        layouts = [layout for layout in layouts if layout.job_id == job]
        if not layouts:
            raise RunError(f"no job {job} is running here.", code="run.no-job", remedy="`ergo local ps` lists them.")
    if not layouts:
        raise RunError("no job is running here.", code="run.no-job", remedy="`ergo run` starts one.")
    if len(layouts) > 1:
        names = ", ".join(layout.job_id for layout in layouts)
        raise RunError(f"several jobs are running here ({names}).", code="run.which-job", remedy="Name one.")
    return ShimClient(layouts[0])
