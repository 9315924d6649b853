"""`ergo fleet`: nodes, their devices, and who is on each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from cli.console import say
from cli.fleet.options import AsJson, Watch, print_json, print_table

if TYPE_CHECKING:
    from rich.table import Table

    from cli.fleet.client import Fleet
    from model.cluster import ClusterView
    from model.control import JobView
    from model.records import NodeRecord


def register(app: typer.Typer) -> None:
    """Adds what this file defines to the command line."""
    app.command("fleet", short_help="Nodes, their devices, and who is on each.")(fleet)


def fleet(watch: Watch = False, as_json: AsJson = False) -> None:
    """Lists the nodes of the fleet: their devices, which jobs are on them, and how old their leases are.

    A node whose lease is over, or which the scheduler has given up, is *lost*; its jobs go on elsewhere.
    """
    from cli.fleet import watching
    from cli.fleet.client import call

    async def main(connected: Fleet) -> None:
        async def look() -> Overview:
            return await overview(connected)

        if watch:
            await watching.watch(look, table=nodes_table, head=_head, document=Overview.to_json if as_json else None)
        else:
            _show(await look(), as_json=as_json)

    call(main)


@dataclass(frozen=True, slots=True)
class TypeRow:
    """Devices of one accelerator model: all, in use, free, and free on nodes that are cordoned or drained."""

    accelerator: str
    devices: int
    held: int
    free: int
    cordoned: int


@dataclass(frozen=True, slots=True)
class Overview:
    """The fleet at a moment.

    Attributes:
        nodes: all that have a record, those too that are lost or have left.
        ages_s: seconds since a node has renewed its lease, by name, by the clocks of the store and of this machine.
        views: the jobs that hold devices.
        scheduler: None where it does not answer.
        cordoned: nodes on which nothing new is placed, by name, with whether they are also drained.
    """

    cluster: str
    nodes: tuple[NodeRecord, ...]
    ages_s: Mapping[str, float]
    views: tuple[JobView, ...]
    scheduler: ClusterView | None
    time: datetime
    cordoned: Mapping[str, bool] = field(default_factory=dict[str, bool])

    def order(self, node: NodeRecord) -> str:
        """``cordoned``, ``draining`` or nothing."""
        drained = self.cordoned.get(node.node.name)
        return "" if drained is None else "draining" if drained else "cordoned"

    def by_type(self) -> list[TypeRow]:
        """Devices of nodes that are alive, by accelerator model."""
        found: dict[str, list[int]] = {}
        for node in self.nodes:
            if self.state(node) != "alive":
                continue
            for device in node.devices:
                counts = found.setdefault(device.accelerator, [0, 0, 0, 0])
                counts[0] += 1
                counts[1 if self.on_device(device.id) else 3 if self.order(node) else 2] += 1
        return [TypeRow(name, *found[name]) for name in sorted(found)]

    def state(self, node: NodeRecord) -> str:
        """``alive``, ``silent`` (its lease is over), ``lost`` or ``left``."""
        if node.left:
            return "left"
        if node.lost:
            return "lost"
        return "silent" if self.ages_s.get(node.node.name, 0.0) > node.lease_s else "alive"

    def on_device(self, device: object) -> list[tuple[str, list[int]]]:
        """The jobs on a device, each with its ranks there."""
        found = []
        for view in self.views:
            ranks = [rank for rank, at in enumerate(view.device_of_rank) if view.placement[at] == device]
            if ranks:
                found.append((str(view.id), ranks))
        return found

    def to_json(self) -> dict[str, Any]:
        """The documented fields."""
        return {
            "cluster": self.cluster,
            "scheduler": None
            if self.scheduler is None
            else {
                "tick": self.scheduler.tick,
                "summary": self.scheduler.summary,
                "waiting_batches": self.scheduler.waiting_batches,
                "undelivered": self.scheduler.undelivered,
            },
            "types": [asdict(row) for row in self.by_type()],
            "nodes": [self._node(node) for node in self.nodes],
        }

    def _node(self, node: NodeRecord) -> dict[str, Any]:
        age = self.ages_s.get(node.node.name)
        return {
            "name": node.node.name,
            "incarnation": node.node.incarnation,
            "state": self.state(node),
            "order": self.order(node),
            "address": node.address,
            "lease_s": node.lease_s,
            "lease_age_s": None if age is None else round(age, 1),
            "devices": [
                {
                    "id": str(device.id),
                    "accelerator": device.accelerator,
                    "memory_bytes": device.memory_bytes,
                    "jobs": [{"id": job, "ranks": ranks} for job, ranks in self.on_device(device.id)],
                }
                for device in node.devices
            ],
            "jobs": [
                {"id": str(part.job), "epoch": int(part.epoch), "step": int(part.step), "device_ms": part.device_ms}
                for part in node.jobs
            ],
        }


async def overview(fleet: Fleet) -> Overview:
    """Looks at nodes, jobs and scheduler, all at once."""
    from cli.fleet.operate import state_of
    from cli.fleet.overview import list_jobs

    records, listing, scheduler = await asyncio.gather(fleet.all_nodes(), list_jobs(fleet), fleet.scheduler())
    state = await state_of(fleet, scheduler) if scheduler is not None else None
    now = datetime.now(UTC)
    return Overview(
        cluster=fleet.settings.cluster,
        nodes=tuple(record for record, _ in records),
        ages_s={record.node.name: max(0.0, (now - at).total_seconds()) for record, at in records if at is not None},
        views=tuple(view for view in listing.views.values() if view.placement),
        scheduler=scheduler,
        time=now,
        cordoned=dict(state.cordoned) if state is not None else {},
    )


def nodes_table(seen: Overview) -> Table:
    """A line a device; what is said of a node is said once."""
    from cli.fleet import words
    from model.units import size_words

    colours = {"alive": "green", "silent": "yellow", "lost": "red", "left": "dim"}
    made = words.table("NODE", "STATE", "LEASE", "DEVICE", "ACCELERATOR", "MEMORY", "JOB", right=("LEASE", "MEMORY"))
    own = {str(view.id) for view in seen.views if view.pack == "node"}
    for node in seen.nodes:
        state, age = seen.state(node), seen.ages_s.get(node.node.name)
        head = [
            node.node.name,
            f"[{colours[state]}]{state}[/]" + (f", {seen.order(node)}" if seen.order(node) else ""),
            "" if age is None or node.left else f"{age:.0f} of {node.lease_s:.0f} s",
        ]
        if node.left:
            made.add_row(*head)
            continue
        for index, device in enumerate(node.devices):
            jobs = [
                f"{job} ({'its own ranks' if job in own else _ranks(ranks)})"
                for job, ranks in seen.on_device(device.id)
            ]
            made.add_row(
                *(head if index == 0 else ("", "", "")),
                "/".join(device.id.path),
                device.accelerator,
                size_words(device.memory_bytes) if device.memory_bytes else "",
                ", ".join(jobs) or ("free" if state == "alive" and not seen.order(node) else ""),
            )
    return made


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def _head(seen: Overview) -> str:
    from cli.fleet import words

    alive = [node for node in seen.nodes if seen.state(node) == "alive"]
    kinds = [
        f"{words.counted(row.devices, 'device')} of {row.accelerator}: {row.held} in use, {row.free} free"
        + (f", {row.cordoned} on cordoned nodes" if row.cordoned else "")
        for row in seen.by_type()
    ]
    return "; ".join([f"cluster {seen.cluster}: {words.counted(len(alive), 'node')}", *kinds])


def _show(seen: Overview, *, as_json: bool) -> None:
    if as_json:
        print_json(seen.to_json())
    else:
        if seen.nodes:
            print_table(nodes_table(seen))
        say(_head(seen))
        if not seen.nodes:
            say("no node has registered yet; see the logs of the node agents")
        elif seen.scheduler is not None and seen.scheduler.summary:
            say(f"scheduler: {seen.scheduler.summary}")
    if seen.scheduler is None:
        say("the scheduler does not answer: running jobs go on, queued ones wait; `ergo up` starts what is missing")
