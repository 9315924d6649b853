"""`ergo node` and `ergo quota`: what an operator orders of the scheduler."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import usage
from cli.console import say
from cli.fleet.options import AsJson, Wait, complete_nodes, print_json, print_table
from model.units import counted

if TYPE_CHECKING:
    from cli.fleet.client import Fleet
    from model.cluster import ClusterView
    from model.orders import NodeOrder, QuotaOrder
    from scheduling.state import ClusterState

TAKEN_S = 20.0
"""How long an order may take until the scheduler's state shows it."""
_LOOK_S = 0.5

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="Name of a node.", autocompletion=complete_nodes)]


def register(app: typer.Typer) -> None:
    """Adds what this file defines to the command line."""
    node = typer.Typer(help="What may be placed on a node.", no_args_is_help=True)
    app.add_typer(node, name="node", short_help="Cordon or drain a node.")
    node.command("cordon", short_help="Place nothing new on a node.")(cordon)
    node.command("drain", short_help="Cordon a node, and have its jobs go on elsewhere.")(drain)
    node.command("uncordon", short_help="Use a node again.")(uncordon)
    quota = typer.Typer(help="How much may be promised to a tenant.", no_args_is_help=True)
    app.add_typer(quota, name="quota", short_help="How much may be promised to a tenant.")
    quota.command("set", short_help="Grant a tenant a quota.")(set_quota)
    quota.command("show", short_help="Quotas, and what is promised and used.")(show_quota)


# -- nodes -----------------------------------------------------------------------------------------------------


def cordon(node: NodeName) -> None:
    """Places nothing new on NODE; what runs there runs on. Until `uncordon`, also when the node restarts."""
    _order_node(node, "cordon")


def drain(node: NodeName, wait: Wait = False) -> None:
    """Cordons NODE and has its jobs move to other nodes; where there is no room for one, it stops with a checkpoint.

    With --wait: until no job has devices there.
    """
    _order_node(node, "drain", wait=wait)


def uncordon(node: NodeName) -> None:
    """Uses NODE again."""
    _order_node(node, "uncordon")


def _order_node(node: str, order: Any, *, wait: bool = False) -> None:
    from cli.fleet.client import FleetError, call
    from model.orders import NodeOrder

    async def main(fleet: Fleet) -> None:
        known = [record.node.name for record in await fleet.nodes()]
        wanted = {"cordon": False, "drain": True}.get(order)
        state = await state_of(fleet)
        if node not in known and (order != "uncordon" or node not in dict(state.cordoned)):
            there = f"The fleet has {', '.join(known)}." if known else "The fleet has no node."
            raise FleetError(f"There is no node {node}.", code="fleet.unknown-node", remedy=there)
        await _tell(fleet, NodeOrder(node, order))
        while True:
            state = await _until(fleet, lambda state: dict(state.cordoned).get(node) == wanted)
            left = jobs_on(state, node)
            if not wait or not left:
                break
            await asyncio.sleep(_LOOK_S)
        does = {"cordon": "is cordoned", "drain": "is drained", "uncordon": "is used again"}[order]
        more = f"; {', '.join(left)} will go on elsewhere" if order == "drain" and left else ""
        say(f"{node} {does}{more}")

    call(main)


def jobs_on(state: ClusterState, node: str) -> list[str]:
    """Jobs that have devices on a node, or may have."""
    return [
        str(job.notice.job) for job in state.jobs if any(device.node.name == node for device in job.held_devices)
    ]  # fmt: skip


# -- quotas ----------------------------------------------------------------------------------------------------


def set_quota(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="A tenant.", callback=usage.tenant)],
    devices: Annotated[str, typer.Argument(metavar="DEVICES", help="Devices times level; `none` for no limit.")],
    weight: Annotated[float, typer.Option("--weight", help="Its share of the basic tier, beside other tenants.")] = 1.0,
    under: Annotated[
        str | None,
        typer.Option(
            "--under", metavar="TENANT", help="The tenant above it, whose quota holds too.", callback=usage.tenant
        ),
    ] = None,
) -> None:
    """Limits what may be promised to TENANT and those below it: a premium job of 8 devices is promised 7.6 of them.

    A job without room in the quota runs on what others leave, before the basic tier, until there is some. What is
    promised already stays so.
    """
    from cli.fleet.client import FleetError, call
    from model.errors import ModelError
    from model.ids import TenantId
    from model.orders import QuotaOrder
    from scheduling.state import above

    try:
        limit = None if devices == "none" else float(devices)
        order = QuotaOrder(TenantId(tenant), limit, weight, TenantId(under) if under else None)
    except ModelError as error:
        raise typer.BadParameter(str(error)) from None
    except ValueError:
        raise typer.BadParameter(f"{devices!r} is no number; give one, or `none`.", param_hint="DEVICES") from None
    if under == tenant:
        raise typer.BadParameter(f"{tenant} is not below itself.", param_hint="--under")

    def shows(state: ClusterState) -> bool:
        wanted = (tenant, under or "", limit, weight)
        return any((item.name, item.under, item.quota, item.weight) == wanted for item in state.tenants)

    async def main(fleet: Fleet) -> None:
        state = await state_of(fleet)
        if under and tenant in above(under, {item.name: item for item in state.tenants}):
            raise FleetError(f"{under} is below {tenant}, or is {tenant}.", code="fleet.quota")
        await _tell(fleet, order)
        await _until(fleet, shows)
        say(f"{tenant}: {'no limit' if limit is None else counted(limit, 'device')}, weight {weight:g}")

    call(main)


def show_quota(as_json: AsJson = False) -> None:
    """Lists tenants: their quota, what is promised to them and those below, and the devices that they hold."""
    from cli.fleet import words
    from cli.fleet.client import call

    async def main(fleet: Fleet) -> None:
        rows = quotas(await state_of(fleet))
        if as_json:
            print_json([row.to_json() for row in rows])
            return
        made = words.table(
            "TENANT", "UNDER", "QUOTA", "PROMISED", "HOLDS", "WEIGHT", right=("QUOTA", "PROMISED", "HOLDS", "WEIGHT")
        )
        for row in rows:
            quota = "none" if row.quota is None else f"{row.quota:g}"
            made.add_row(row.tenant, row.under, quota, f"{row.promised:g}", str(row.holds), f"{row.weight:g}")
        if rows:
            print_table(made)
        else:
            say("no tenant has had a job yet")

    call(main)


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """A tenant; what `ergo quota show --json` prints. `promised` in devices times level."""

    tenant: str
    under: str
    quota: float | None
    promised: float
    holds: int
    weight: float

    def to_json(self) -> dict[str, Any]:
        """The documented fields."""
        return {name: getattr(self, name) for name in self.__slots__}


def quotas(state: ClusterState) -> list[QuotaRow]:
    """All tenants, by name, each with what those below it have."""
    from scheduling.accounts import CORE_TIER
    from scheduling.core.settings import LEVELS
    from scheduling.state import above

    known = {tenant.name: tenant for tenant in state.tenants}
    promised, holds = dict.fromkeys(known, 0.0), dict.fromkeys(known, 0)
    for job in state.jobs:
        demand = job.notice.demand
        level = LEVELS[CORE_TIER[demand.tier]] if job.account and job.account.admitted is not None else 0.0
        for name in above(demand.tenant, known):
            promised[name] = promised.get(name, 0.0) + level * demand.max_width
            holds[name] = holds.get(name, 0) + len(job.notice.devices)
    return [
        QuotaRow(
            name,
            known[name].under if name in known else "",
            known[name].quota if name in known else None,
            round(promised[name], 3),
            holds[name],
            known[name].weight if name in known else 1.0,
        )
        for name in sorted(promised)
    ]


# -- the scheduler ---------------------------------------------------------------------------------------------


async def state_of(fleet: Fleet, view: ClusterView | None = None) -> ClusterState:
    """The scheduler's newest state, from the store; an empty one before its first plan.

    `view`: what the scheduler has just answered; it is asked where that is not given.
    """
    from activities.snapshots import Snapshots
    from scheduling.state import ClusterState

    view = view or await fleet.scheduler()
    snapshots = Snapshots(fleet.store, fleet.settings.cluster)

    def read() -> ClusterState:
        found = snapshots.read(view.digest) if view is not None and view.digest else None
        return found or snapshots.newest() or ClusterState(fleet.settings.cluster)

    return await asyncio.to_thread(read)


async def _tell(fleet: Fleet, order: NodeOrder | QuotaOrder) -> None:
    from activities.inbox import Inbox

    await Inbox(await fleet.temporal(), fleet.settings.cluster).tell(order)


async def _until(fleet: Fleet, shows: Any) -> ClusterState:
    """The scheduler's state once it shows what was ordered.

    Raises:
        NoAnswer: it does not in time; the order stays in the scheduler's inbox.
    """
    from cli.fleet.client import NoAnswer

    try:
        async with asyncio.timeout(TAKEN_S):
            while not shows(state := await state_of(fleet)):
                await asyncio.sleep(_LOOK_S)
            return state
    except TimeoutError:
        raise NoAnswer(
            "The scheduler has the order and does not act on it yet.",
            remedy="It will once its worker is back; `ergo up` starts what is missing.",
        ) from None
