"""What arrives at a simulated fleet, and what the fleet is made of."""

from __future__ import annotations

from dataclasses import dataclass

from model.job_spec import Tier


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job of a trace.

    Attributes:
        submit_s: seconds after the trace's beginning.
        duration_s: seconds that it runs at its full width, undisturbed.
        devices: its world size, which is its full width.
        tenant: who pays.
        tier: None where the trace has none: `assign_tiers` gives it one.
        unit: devices of neighbouring ranks that stay on one node.
        model: accelerator model that it asks for; empty for any.
        log: number of the log that it is from.
    """

    id: str
    submit_s: float
    duration_s: float
    devices: int
    tenant: str = "default"
    tier: Tier | None = None
    unit: int = 1
    model: str = ""
    log: int = 0


@dataclass(frozen=True, slots=True)
class FleetShape:
    """A fleet of equal nodes.

    Attributes:
        nodes_per_rack: neighbours that share a switch.
        spot_nodes: so many of the nodes are leased, and go and come back.
    """

    nodes: int
    devices_per_node: int
    nodes_per_rack: int = 16
    spot_nodes: int = 0
    model: str = ""

    @property
    def devices(self) -> int:
        """All of them."""
        return self.nodes * self.devices_per_node


@dataclass(frozen=True, slots=True)
class Costs:
    """What an operation costs, in seconds in which the job's devices do nothing for it.

    Traces have durations from start to end, so that the first start is in them and costs nothing here.

    Attributes:
        resize_s: a change of width, and a move. Half of it to stop with a checkpoint, half to go on from one. A job
            that a policy kills starts again after as long.
        start_s: from the first devices to the first step, where a trace's durations leave that out.
        checkpoint_every_s: how old the newest checkpoint is at most when a node fails.
        between_clusters_s: until the checkpoint of a job that has run is in another cluster of its region, beside what
            a stop and a start take; `between_regions_s` in another region.
    """

    resize_s: float = 30.0
    start_s: float = 0.0
    checkpoint_every_s: float = 600.0
    between_clusters_s: float = 60.0
    between_regions_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Failures:
    """What breaks, drawn from a seed. Zeros: nothing.

    Attributes:
        node_mtbf_s: mean time between failures of one node; a node in a thousand a day is 86.4e6.
        repair_s: until a failed node is back.
        spot_lease_s: mean time that a leased node stays; `spot_notice_s` before its end it says so.
    """

    seed: int = 0
    node_mtbf_s: float = 0.0
    repair_s: float = 4 * 3600.0
    spot_lease_s: float = 0.0
    spot_notice_s: float = 120.0
    spot_away_s: float = 2 * 3600.0
