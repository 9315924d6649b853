"""Views and records as the fleet would give them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from model.control import CheckpointView, DecisionView, JobView, TransitionView
from model.ids import CheckpointId, DeviceId, Epoch, JobId, NodeId, Step, TenantId
from model.job_spec import Tier
from model.job_state import JobPhase
from model.manifest import NumericsClass
from model.records import JobOnNode, NodeDevice, NodeRecord

START = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
NODE_1, NODE_2 = NodeId("node-1", 1), NodeId("node-2", 3)
CHECKPOINT = CheckpointId("ck-" + "0" * 38 + "2a")


def device(node: NodeId, index: int) -> DeviceId:
    return DeviceId(node, (f"cpu-{index}",))


def view(job: str = "char-gpt-x7k2mn", **fields: object) -> JobView:
    """A running job of two ranks on node-1, which was preempted once."""
    placement = (device(NODE_1, 0), device(NODE_1, 1))
    made = JobView(
        id=JobId(job),
        name="char-gpt",
        tenant=TenantId("default"),
        tier=Tier.BASIC,
        ranks=2,
        phase=JobPhase.RUNNING,
        held=False,
        step=Step(120),
        epoch=Epoch(2),
        width=2,
        placement=placement,
        device_of_rank=(0, 1),
        submitted_at=START,
        gpu_fraction=0.815,
        preemptions=1,
        moves=0,
        recoveries=0,
        checkpoints=(
            CheckpointView(CHECKPOINT, "full", at(60), Step(120), 3 << 20, 40 << 20, 812.0),
        ),
        decisions=(
            DecisionView(at(0), "place", "2 devices are free on node-1"),
            DecisionView(at(59), "preempt", "digits-4 of tier premium needs 4 devices"),
        ),
        transitions=(
            TransitionView(at(0), JobPhase.QUEUED, "submitted", Epoch(0)),
            TransitionView(at(1), JobPhase.STARTING, "placed", Epoch(1), placement),
            TransitionView(at(3), JobPhase.RUNNING, "started", Epoch(1), placement),
            TransitionView(at(60), JobPhase.SUSPENDED, "preempted for digits-4", Epoch(1), (), Step(120)),
            TransitionView(
                at(120), JobPhase.RUNNING, "restored", Epoch(2), placement, Step(120), 61_500.0,
                {"waiting": 60_000.0, "restore": 1500.0},
            ),
        ),
    )  # fmt: skip
    return replace(made, **fields)  # pyright: ignore[reportArgumentType]


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def node(identity: NodeId = NODE_1, *parts: JobOnNode, devices: int = 2, **fields: object) -> NodeRecord:
    """A node with CPU accelerators."""
    return NodeRecord(
        node=identity,
        cluster="local",
        boot_id="boot",
        address="127.0.0.1:1",
        devices=tuple(NodeDevice(id=device(identity, index), accelerator="cpu") for index in range(devices)),
        numerics=NUMERICS,
        jobs=parts,
        **fields,  # pyright: ignore[reportArgumentType]
    )


NUMERICS = NumericsClass(torch="2.15.0", device_model="cpu", instruction_set="AVX2", threads_per_device=1)
