"""Records v1: the small facts of a fleet that several processes write, each by compare-and-swap in the fleet's store.

They outlive every workflow and process: a job's ``HEAD`` (which epoch counts, which checkpoint is the newest), and
what each node says of itself (devices, address, lease). `proxy_runtime.storage` reads and writes them.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from model.ids import CheckpointId, DeviceId, Epoch, Generation, JobId, NodeId, Step, TenantId
from model.manifest import NumericsClass

Count = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class JobHead(_Record):
    """What counts of a job: the fence of its epochs, and its newest checkpoint.

    Attributes:
        tenant: whose chunks it is made of.
        first_execution_run: of the workflow that owns the id now; another one has taken the id over.
        generation: of the workflow's events; grows with every run of the workflow that opens the record.
        generation_run: run id of the workflow that holds `generation`; only it may publish.
        allocated: highest epoch that was ever handed out. None is handed out twice.
        epoch: the epoch that counts; 0 before the first. Whoever is of a lower one ends its own.
        former_runs: runs of workflows that held the generation before, newest last; none of them gets it again.
        nodes: where that epoch is.
        before: where the one before it was: its parts there may not have ended yet.
        checkpoint: the newest committed one; None before the first. Only the epoch that counts commits.
        checkpoint_epoch: the epoch that committed it.
        step: the lowest step of any rank in it.
        final: checkpoint of the volume after the job has ended.
    """

    format: Literal["ergosphere/job-head"] = "ergosphere/job-head"
    version: Literal[1] = 1
    job: JobId
    tenant: TenantId
    first_execution_run: str
    generation: Generation
    generation_run: str
    former_runs: tuple[str, ...] = ()
    allocated: Epoch = Epoch(0)
    epoch: Epoch = Epoch(0)
    nodes: tuple[NodeId, ...] = ()
    before: tuple[NodeId, ...] = ()
    checkpoint: CheckpointId | None = None
    checkpoint_epoch: Epoch = Epoch(0)
    step: Step = Step(0)
    final: CheckpointId | None = None

    @model_validator(mode="after")
    def _epochs(self) -> Self:
        if self.epoch > self.allocated:
            raise ValueError(f"Epoch {self.epoch} of job {self.job} was never handed out.")
        return self


class JobOnNode(_Record):
    """A job's part on a node, as the node tells it with its lease.

    Attributes:
        step: the lowest step of the node's ranks.
        device_ms: device time delivered in this epoch, in milliseconds, over all devices of the node.
    """

    job: JobId
    epoch: Epoch
    step: Step = Step(0)
    device_ms: Count = 0


class NodeDevice(_Record):
    """One accelerator of a node; `memory_bytes` is 0 where nobody knows."""

    id: DeviceId
    accelerator: str
    memory_bytes: Count = 0


class NodeRecord(_Record):
    """What a node says of itself; renewing its lease writes it anew with a higher `beat`.

    A reader takes a node for lost when `beat` has not changed for the length of a lease by the reader's own clock, so
    that no two clocks are ever compared.

    Attributes:
        node: its name and incarnation; whoever finds a higher incarnation here is out of date and ends what it has.
        boot_id: of the kernel: after a restart of the machine nothing of an incarnation is left.
        address: ``host:port`` of the node's agent, for other nodes and for logs.
        beat: grows with every renewal.
        lost: the cluster has given the incarnation up; it must not be used again.
        left: the node was shut down in order and holds nothing.
        numerics: class of its devices, without which no job is placed.
    """

    format: Literal["ergosphere/node"] = "ergosphere/node"
    version: Literal[1] = 1
    node: NodeId
    cluster: str
    boot_id: str
    address: str
    devices: tuple[NodeDevice, ...]
    numerics: NumericsClass
    beat: Count = 0
    lease_s: Annotated[float, Field(gt=0)] = 10.0
    lost: bool = False
    left: bool = False
    jobs: tuple[JobOnNode, ...] = ()
