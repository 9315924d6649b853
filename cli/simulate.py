"""`ergo simulate`: the scheduler's policy, and others, on a job log; no fleet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cli.console import say
from model.errors import ModelError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scheduling.simulator.clusters import Clusters
    from scheduling.simulator.experiment import Experiment, Report, Workload
    from scheduling.simulator.formats import Columns, TimeUnit
    from scheduling.simulator.measures import Measures
    from scheduling.simulator.tiers import TierShares
    from scheduling.simulator.workload import Costs

_POLICIES = "ours,fifo,backfill,las,srtf,restart"
_MOVING = "ours,region,fleet"
_DAY_S = 86_400.0
_SPOT_LEASE_S = 12 * 3600.0
_SYNTHETIC_JOBS = 10_000
_TRANSFERS_S = "60,600"
_SYNTHETIC_LOAD = 0.85
_T = TypeVar("_T")


class Unit(StrEnum):
    """What a number in a column of times counts."""

    S = "s"
    MIN = "min"
    MS = "ms"


class MadeUp(StrEnum):
    """Kinds of made-up jobs."""

    ITP = "itp"
    LLM = "llm"


def register(app: typer.Typer) -> None:
    """Adds what this file defines to the command line."""
    app.command("simulate", short_help="The scheduler's policy, and others, on a job log.")(simulate)


def simulate(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="Job logs: CSV, plain or gzip. Several are one log.", show_default=False),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Nodes of the fleet.", show_default=False)
    ] = None,
    clusters: Annotated[
        str | None,
        typer.Option(
            metavar="N,N.../N,N...",
            help="In place of --nodes: the nodes of each of several clusters, regions apart by a slash.",
            show_default=False,
        ),
    ] = None,
    devices_per_node: Annotated[int, typer.Option(min=1, max=1024, help="Devices of each node.")] = 8,
    tiers: Annotated[
        str, typer.Option(metavar="P,S,B", help="Percent premium, standard and basic, of jobs whose log has no tier.")
    ] = "20,40,40",
    seed: Annotated[int, typer.Option(help="Of tiers, failures and made-up jobs.")] = 0,
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Which to run, in which order.",
            show_default=f"{_POLICIES}; with --clusters {_MOVING}",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=COLUMN,...",
            help="Which column holds submit, duration, devices, and, if there, tenant, tier, id.",
            show_default=False,
        ),
    ] = None,
    time_unit: Annotated[
        Unit | None,
        typer.Option(help="Of numbers in columns of times; else the format's own, or s.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, max=10_000_000, metavar="N", help="Only the first N jobs submitted.", show_default=False),
    ] = None,
    synthetic: Annotated[
        MadeUp | None,
        typer.Option(
            help="No log: jobs made up in the shape of real ones, of 2021 or with LLM sizes.", show_default=False
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, max=10_000_000, help="With --synthetic: how many.", show_default=f"{_SYNTHETIC_JOBS:,}"),
    ] = None,
    load: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=100,
            metavar="SHARE",
            help="Stretch the times of submission until this share of the fleet's device time is asked for.",
            show_default=f"as in the log; {_SYNTHETIC_LOAD} when made up",
        ),
    ] = None,
    resize_seconds: Annotated[float, typer.Option(min=0, max=_DAY_S, help="What a resize or move takes.")] = 30.0,
    transfer_seconds: Annotated[
        str | None,
        typer.Option(
            metavar="CLUSTER,REGION",
            help="With --clusters: until a checkpoint is in another cluster, or another region.",
            show_default=_TRANSFERS_S,
        ),
    ] = None,
    mtbf: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1e6,
            metavar="DAYS",
            help="A node fails once in so many days; else never.",
            show_default=False,
        ),
    ] = None,
    spot: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="So many of the nodes (of each cluster) are leased, and come and go."),
    ] = 0,
    lose: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LEVEL:FROM-TO",
            help="With --clusters: a region or the fleet is lost between these hours; again for more.",
            show_default=False,
        ),
    ] = None,
    level_mtbf: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1e6,
            metavar="DAYS",
            help="With --clusters: each region, and the fleet, is lost once in so many days, for 4 h; else never.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="OUT", help="Write a page with charts, too.", show_default=False)
    ] = None,
) -> None:
    """Runs policies of scheduling on a job log and shows what each makes of it, in minutes, without a fleet.

    ours is the policy that a fleet runs, unchanged. fifo, backfill, las and srtf are what the literature compares with
    (srtf knows how long jobs will take); restart is ours as schedulers that kill have it: no preemption, move or resize
    but by going back to an hourly checkpoint. With --clusters each cluster has a scheduler of its own; region and fleet
    are ours with moves of jobs between the clusters of a region, and between regions.

    Known logs are found by their header, and one that says submit,duration,devices is taken as it is; other logs need
    --columns. Lines that cannot be used are counted and left out.
    """
    if policies is None:
        policies = _POLICIES if clusters is None else _MOVING if "/" in clusters else _MOVING.rpartition(",")[0]
    shares, known, unit, names = _usage(tiers, columns, time_unit, policies, clusters)
    _check_source(
        files or [], synthetic, {"--jobs": jobs}, {"--limit": limit, "--columns": columns, "--time-unit": unit}
    )
    if (nodes is None) == (clusters is None):
        raise typer.BadParameter("Give either --nodes or --clusters.")
    if nodes is not None and spot > nodes:
        raise typer.BadParameter(f"{spot} leased nodes are more than the {nodes} of the fleet.", param_hint="--spot")
    if page is not None and (page.is_dir() or not page.absolute().parent.is_dir()):
        raise typer.BadParameter(f"{page} is no place for a file.", param_hint="--html")
    parts = None
    if clusters is not None:
        parts = _clusters(clusters, devices_per_node, spot, files or [], lose or [], level_mtbf)
        nodes, spot = sum(one.fleet.nodes for one in parts.members), spot * len(parts.members)
    elif lose or level_mtbf is not None:
        raise typer.BadParameter("Only with --clusters is there a level that could be lost.")
    elif transfer_seconds is not None:
        raise typer.BadParameter("It goes with --clusters only.", param_hint="--transfer-seconds")
    assert nodes is not None
    size = nodes * devices_per_node
    if synthetic is not None:
        work = _made_up(
            synthetic, jobs or _SYNTHETIC_JOBS, size, _SYNTHETIC_LOAD if load is None else load, shares, seed
        )
    else:
        work = _read(files or [], known, unit, limit, shares, seed)
        if load is not None:
            work = work.at_load(size, load)
    costs = _costs(resize_seconds, transfer_seconds or _TRANSFERS_S)
    experiment = _experiment(work, nodes, devices_per_node, spot, costs, mtbf, seed, parts)
    _warn(experiment)
    report = experiment.report(_run(experiment, names))
    if as_json:
        import orjson

        sys.stdout.buffer.write(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    else:
        _show(report)
    if page is not None:
        _write_page(page, report)


def _usage(
    tiers: str, columns: str | None, unit: Unit | None, policies: str, clusters: str | None
) -> tuple[TierShares, Columns | None, TimeUnit | None, list[str]]:
    """What options say that are more than a word or a number."""
    from scheduling.simulator.formats import Columns, TimeUnit
    from scheduling.simulator.policies import MOVING, POLICIES
    from scheduling.simulator.tiers import TierShares

    shares = _parsed("--tiers", lambda: TierShares.parse(tiers))
    known = None if columns is None else _parsed("--columns", lambda: Columns.parse(columns))
    names = [name.strip() for name in policies.split(",")]
    allowed = list(POLICIES) if clusters is None else [*POLICIES, *MOVING]
    for name in names:
        if name in MOVING and clusters is None:
            raise typer.BadParameter(f"{name} moves jobs between clusters: give --clusters.", param_hint="--policies")
        if name not in allowed:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(allowed)}.", param_hint="--policies")
        if names.count(name) > 1:
            raise typer.BadParameter(f"{name} is there twice, and would give the same twice.", param_hint="--policies")
    return shares, known, None if unit is None else TimeUnit(unit.value), names


def _check_source(
    files: Sequence[Path], synthetic: MadeUp | None, of_made_up: Mapping[str, object], of_logs: Mapping[str, object]
) -> None:
    """Checks that jobs come from one place, and that no option is about the other one."""
    if bool(files) == (synthetic is not None):
        raise typer.BadParameter("Give either job logs or --synthetic.")
    for options, source in ((of_made_up, "--synthetic"), (of_logs, "job logs")):
        given = [option for option, value in options.items() if value is not None]
        if given and bool(files) == (source == "--synthetic"):
            raise typer.BadParameter(f"It goes with {source} only.", param_hint=given[0])
    for path in files:
        if [other.absolute() for other in files].count(path.absolute()) > 1:
            raise typer.BadParameter(f"{path} is there twice: each of its jobs would be, too.", param_hint="FILE")


def _parsed(option: str, parse: Callable[[], _T]) -> _T:
    try:
        return parse()
    except ModelError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _made_up(kind: MadeUp, jobs: int, devices: int, load: float, shares: TierShares, seed: int) -> Workload:
    from scheduling.simulator.experiment import Workload
    from scheduling.simulator.synthetic import Kind

    return Workload.made_up(Kind(kind.value), jobs, devices, load, shares, seed)


def _read(
    files: Sequence[Path],
    columns: Columns | None,
    unit: TimeUnit | None,
    limit: int | None,
    shares: TierShares,
    seed: int,
) -> Workload:
    from model.units import counted
    from scheduling.simulator.experiment import Workload
    from scheduling.simulator.traces import read_traces

    trace = read_traces(files, columns=columns, unit=unit, limit=limit)
    if trace.damaged:
        say(f"{counted(trace.damaged, 'line')} of {trace.lines:,} cannot be used and {_are(trace.damaged)} left out:")
        for damage in trace.first_damaged:
            say(f"  {damage}")
        if trace.damaged > len(trace.first_damaged):
            say(f"  and {trace.damaged - len(trace.first_damaged):,} more")
    for end in trace.cut_off:
        say(f"{end}; what comes before is used")
    if trace.renamed:
        say(f"{counted(trace.renamed, 'job')} had the id of another one and got a number behind it")
    return Workload.of_trace(trace, shares, seed)


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _clusters(
    text: str, devices_per_node: int, spot: int, files: Sequence[Path], lose: Sequence[str], mtbf: float | None
) -> Clusters:
    from scheduling.simulator.clusters import Clusters, parse_clusters, parse_outages

    names = [path.name.partition(".")[0] for path in files]
    members = _parsed("--clusters", lambda: parse_clusters(text, devices_per_node, spot, names))
    outages = _parsed("--lose", lambda: parse_outages(lose))
    return _parsed("--lose", lambda: Clusters(members, outages, 0.0 if mtbf is None else mtbf * _DAY_S))


def _costs(resize_s: float, transfers: str) -> Costs:
    from scheduling.simulator.workload import Costs

    option = "--transfer-seconds"
    try:
        between = [float(part) for part in transfers.split(",")]
    except ValueError:
        between = []
    if len(between) != 2 or not all(0 <= seconds <= _DAY_S for seconds in between):
        raise typer.BadParameter(f"{transfers!r} is not two numbers of seconds, up to a day.", param_hint=option)
    return Costs(resize_s=resize_s, between_clusters_s=between[0], between_regions_s=between[1])


def _experiment(
    work: Workload,
    nodes: int,
    devices_per_node: int,
    spot: int,
    costs: Costs,
    mtbf: float | None,
    seed: int,
    clusters: Clusters | None,
) -> Experiment:
    from scheduling.simulator.experiment import Experiment
    from scheduling.simulator.workload import Failures, FleetShape

    failures = Failures(
        seed=seed, node_mtbf_s=0.0 if mtbf is None else mtbf * _DAY_S, spot_lease_s=_SPOT_LEASE_S if spot else 0.0
    )
    fleet = FleetShape(nodes, devices_per_node, spot_nodes=spot)
    return Experiment(work, fleet, costs, failures, seed, clusters)


def _warn(experiment: Experiment) -> None:
    from model.units import counted

    devices, work = experiment.fleet.devices, experiment.workload
    who = "the fleet" if experiment.clusters is None else "the largest cluster"
    if large := len(work.jobs) - len(experiment.jobs):
        most = max(job.devices for job in work.jobs)
        say(
            f"{counted(large, 'job')} asked for more than the {experiment.largest:,} devices of {who}, up to {most:,}, "
            f"and {_are(large)} left out"
        )
    if not experiment.jobs:
        raise ModelError("No job of the log fits the fleet.", code="simulate.nothing")
    load = work.load(devices)
    if load is not None and load > 1:
        say(
            f"the jobs ask for {load:.2f} times the device time that the fleet has until the last is submitted: "
            "the queue only grows"
        )


def _run(experiment: Experiment, policies: Sequence[str]) -> list[Measures]:
    import time

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from cli.console import messages
    from scheduling.simulator.engine import simulate as engine

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    count = len(experiment.jobs)
    found: list[Measures] = []
    with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as progress:
        for policy in policies:
            task = progress.add_task(policy, total=count)
            begun = time.monotonic()
            found.append(experiment.run(policy, engine, lambda ended, task=task: progress.advance(task, ended)))
            progress.update(task, completed=count)
            if ended := count - found[-1].ended:
                say(f"{policy}: {ended:,} of {count:,} jobs have not ended: for a week, none got any further")
            if not messages.is_terminal:
                say(f"{policy}: {count:,} jobs in {time.monotonic() - begun:.1f} s")
    return found


def _show(report: Report) -> None:
    from rich.measure import Measurement

    from cli.console import data
    from cli.fleet.options import print_table

    made = table(report)
    if data.is_terminal:
        # Whole figures, even if a line then takes two on a narrow screen.
        data.width = max(data.width, Measurement.get(data, data.options.update(width=1000), made).maximum)
        data.print(made, crop=False)
    else:
        print_table(made)
    for policy in report.policies:
        for reason, count in policy.waiting_for[:3]:
            data.print(f"{policy.policy}: {count:,} still wait at the end: {reason}", markup=False)
    settings = report.settings
    data.print(settings.tiers, markup=False)
    for name, text in settings.told():
        if name not in ("tiers", "seed", "versions"):
            data.print(f"{name}: {text}", markup=False)


def _write_page(path: Path, report: Report) -> None:
    from scheduling.simulator.page import page

    try:
        path.write_text(page(report))
    except OSError as error:
        raise ModelError(f"The page {path} cannot be written: {error.strerror}.", code="simulate.page") from None
    say(f"the page is {path}")


def table(report: Report) -> RenderableType:
    """A row a figure, a column a policy."""
    from rich.text import Text

    from cli.fleet import words
    from scheduling.simulator.figures import rows

    names = [one.policy for one in report.policies]
    made: Any = words.table("", *names, right=tuple(names))
    for row in rows(report.policies):
        if row.cells:
            made.add_row(Text(f"  {row.label}"), *(Text(cell) for cell in row.cells))
        else:
            made.add_row(Text(row.label, style="bold"))
    return made
