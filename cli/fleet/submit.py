"""`ergo submit`: a script and its directory become a job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.console import say
from cli.fleet import spec as specs
from cli.fleet.options import complete_tiers
from model.errors import ModelError
from model.units import counted

if TYPE_CHECKING:
    from cli.fleet.client import Fleet
    from model.job_spec import JobSpec


def register(app: typer.Typer) -> None:
    """Adds what this file defines to the command line."""
    app.command(
        "submit",
        context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
        short_help="Submit a script as a job of the fleet.",
    )(submit)


def submit(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGUMENTS]...", help="A Python script, or -m MODULE; with --pack node a launcher too."
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="A JobSpec, in YAML or JSON; options overrule it."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks, each a process of the script.")] = None,
    tier: Annotated[str | None, typer.Option(help="premium, standard or basic.", autocompletion=complete_tiers)] = None,
    tenant: Annotated[str | None, typer.Option(help="Who the job belongs to.")] = None,
    name: Annotated[str | None, typer.Option(help="What people call it; default: the script's name.")] = None,
    priority: Annotated[int | None, typer.Option(help="Order within tier and tenant; higher is earlier.")] = None,
    min_devices: Annotated[int | None, typer.Option(metavar="K", help="Fewest devices that it may run on.")] = None,
    pack: Annotated[
        str | None,
        typer.Option(help="rank: a process of the script for each rank; node: one, which starts its own ranks."),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(metavar="N", help="With --pack node: devices that the script sees, on one node.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="A variable, in plain text; repeatable.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(metavar="SECONDS", help="Between periodic checkpoints; 0 for none.", min=0)
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="The job directory; default: the current one.")
    ] = None,
    upload: Annotated[bool, typer.Option("--upload/--no-upload", help="Upload the job directory.")] = True,
    wait: Annotated[bool, typer.Option("--wait", help="Until the job has ended, and end as it does.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the JobSpec and start nothing.")] = False,
) -> None:
    """Uploads the job directory and starts SCRIPT in it on the fleet. Prints the id of the job.

    The job then lives in the fleet: Ctrl-C here, with --wait too, does not end it.
    """
    flags = specs.Flags(
        name,
        tenant,
        tier,
        priority,
        ranks,
        min_devices,
        pack,
        devices,
        checkpoint_every,
        tuple(env or ()),
        tuple(command or ()),
    )
    try:
        spec, source = _spec(flags, file, directory, upload=upload)
    except (ModelError, specs.SpecError) as error:
        say(str(error))
        raise typer.Exit(2) from None
    if dry_run:
        _print_spec(spec, source)
        return

    job = _submit(spec, source)
    sys.stdout.write(f"{job}\n")
    sys.stdout.flush()
    if wait:
        from cli.fleet.follow import follow

        raise typer.Exit(follow(job))


def _spec(
    flags: specs.Flags, file: Path | None, directory: Path | None, *, upload: bool
) -> tuple[JobSpec, Path | None]:
    """The job, with a placeholder for the volume that is yet to be uploaded, and what is to be uploaded."""
    if directory is not None and not upload:
        raise specs.SpecError("--dir names what is uploaded, and --no-upload uploads nothing.", remedy="Leave out one.")
    fields = specs.read_job_file(file) if file is not None else {}
    if not flags.command and not fields.get("argv"):
        raise specs.SpecError(
            "A script is needed.", remedy="`ergo submit [OPTIONS] SCRIPT [ARGUMENTS]`, or a file that has `argv`."
        )
    # A job file that says where its files are is not overruled by the directory one happens to be in.
    source = directory or (Path.cwd() if upload and "volume" not in fields else None)
    if source is not None and not source.is_dir():
        raise specs.SpecError(f"The job directory {source} does not exist.", code="submit.directory")
    launcher = (flags.pack or fields.get("pack")) == "node"
    argv = specs.command_line(flags.command, source, launcher=launcher) if flags.command else []
    script = flags.command[0] if flags.command else "/"
    if source is None and "volume" not in fields and argv[:1] == ["python"] and not script.startswith(("/", "-m")):
        raise specs.SpecError(
            f"Without an upload the job directory is empty: nobody would find {script} in it.",
            code="submit.script",
            remedy="Give its absolute path on the nodes.",
        )
    volume = {"kind": "empty"} if source is not None else None
    return specs.build_spec(fields, flags, argv, volume), source


def _print_spec(spec: JobSpec, source: Path | None) -> None:
    sys.stdout.write(spec.model_dump_json(by_alias=True, indent=2) + "\n")
    if source is not None:
        say(f"{source.absolute()} would be uploaded and be the job's `volume`; nothing was started")


def _submit(spec: JobSpec, source: Path | None) -> str:
    from cli.fleet.client import Fleet, call, interruptible
    from model.job_spec import UploadedVolume

    job = specs.fresh_job_id(spec.name)
    if source is not None:
        from cli.fleet.progress import transferring
        from proxy_runtime.storage.volumes import upload_directory

        call(lambda fleet: fleet.temporal())  # a fleet that is away is found out before anything is uploaded
        with interruptible(), transferring(f"uploading {source}") as progress:
            manifest = upload_directory(Fleet.load().store, spec.tenant, source, progress=progress)
        spec = spec.model_copy(update={"volume": UploadedVolume(manifest=manifest)})

    async def begin(fleet: Fleet) -> None:
        fleet.note(job, "submits", name=spec.name, tier=spec.tier, ranks=spec.ranks, tenant=spec.tenant)
        await start(fleet, job, spec)
        await _tell(fleet, job, spec)

    call(begin)
    return job


async def start(fleet: Fleet, job: str, spec: JobSpec) -> None:
    """Starts a job's workflow, with what the Temporal UI and `ergo ps` show before a worker has seen it."""
    from temporalio.common import WorkflowIDReusePolicy
    from temporalio.service import RPCError, RPCStatusCode

    from cli.fleet.overview import MEMO_NAME, MEMO_PACK, MEMO_RANKS
    from model.names import JOB_TASK_QUEUE, JOB_WORKFLOW

    client = await fleet.temporal()
    options: dict[str, Any] = {
        "id": job,
        "task_queue": JOB_TASK_QUEUE,
        "id_reuse_policy": WorkflowIDReusePolicy.REJECT_DUPLICATE,
        "memo": {MEMO_NAME: spec.name, MEMO_RANKS: spec.ranks, MEMO_PACK: spec.pack},
        "static_summary": summary(spec),
        "static_details": details(spec),
    }
    try:
        await client.start_workflow(JOB_WORKFLOW, spec, **options, search_attributes=_attributes(spec))
    except RPCError as error:
        if error.status is not RPCStatusCode.INVALID_ARGUMENT or "search attribute" not in str(error).lower():
            raise
        # A namespace without our attributes: the job runs all the same, only lists cannot be narrowed.
        await client.start_workflow(JOB_WORKFLOW, spec, **options)


def summary(spec: JobSpec) -> str:
    """One line for the Temporal UI; it takes 400 bytes."""
    from cli.fleet import words

    ranks = "its own ranks" if spec.pack == "node" else words.counted(spec.ranks, "rank")
    return f"{spec.name}: {spec.tier}, {ranks}, {spec.tenant}".encode()[:390].decode(errors="ignore")


def details(spec: JobSpec) -> str:
    """Markdown for the Temporal UI. Variables are named, never shown."""
    import shlex

    command = shlex.join(spec.argv).replace("`", "'")
    rows = {
        "tier": spec.tier,
        "tenant": spec.tenant,
        "ranks": "its own" if spec.pack == "node" else spec.ranks,
        "devices": f"{spec.widest} on one node" if spec.pack == "node" else f"{spec.min_width} to {spec.widest}",
        "priority": spec.priority,
        "directory": spec.volume.kind,
        "checkpoint every": "never" if spec.checkpoint.every_s is None else f"{spec.checkpoint.every_s} s",
        "variables": ", ".join(spec.environment) or "none",
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join([f"**{spec.name}**", "", f"`{command[:2000]}`", "", "| | |", "|---|---|", *lines])


def _attributes(spec: JobSpec) -> Any:
    from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes

    from model.job_state import JobPhase
    from model.names import SearchAttribute

    given = {
        SearchAttribute.TENANT: str(spec.tenant),
        SearchAttribute.TIER: spec.tier.value,
        SearchAttribute.PHASE: JobPhase.QUEUED.value,
    }
    return TypedSearchAttributes(
        [SearchAttributePair(SearchAttributeKey.for_keyword(name.value), value) for name, value in given.items()]
    )


async def _tell(fleet: Fleet, job: str, spec: JobSpec) -> None:
    """Where to look, and at once what is known to stand in the way."""
    from proxy_runtime.errors import ErgoError

    say(f"submitted; `ergo logs {job} -f` follows its output, `ergo show {job}` its life")
    if address := fleet.ui(job):
        say(f"in the Temporal UI: {address}")
    if not await fleet.served():
        say("no worker serves jobs now: it starts once one does; `ergo up` starts what is missing")
    try:
        nodes = await fleet.nodes()
    except ErgoError:
        return
    fitting = [sum(spec.accelerator in (None, device.accelerator) for device in node.devices) for node in nodes]
    if text := too_few(spec, *fitting):
        say(text)


def too_few(spec: JobSpec, *by_node: int) -> str:
    """Why a job cannot run on nodes with so many devices each that it may use; empty where it can."""
    kind = f" of the kind {spec.accelerator}" if spec.accelerator else ""
    devices, most = sum(by_node), max(by_node, default=0)
    if spec.pack == "node" and most < spec.devices_per_rank:
        return (
            f"it needs {counted(spec.devices_per_rank, 'device')}{kind} on one node, and none has more than {most}: "
            "it stays queued until one has"
        )
    has = f"the fleet has {devices}{kind}" if devices else f"the fleet has none{kind}"
    if devices < spec.min_width:
        count = counted(spec.min_width, "device")
        return f"it needs at least {count}, and {has}: it stays queued until there are enough"
    if devices < spec.widest:
        return f"it asks for {counted(spec.widest, 'device')}, and {has}: it may stay queued; `ergo explain` tells"
    return ""
