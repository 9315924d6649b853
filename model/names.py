"""Names that belong to JobSpec v1: what a client of the workflow engine types. They stay what they are within v1."""

from __future__ import annotations

from enum import StrEnum

from model.ids import NodeId

JOB_WORKFLOW = "Job"
"""Type of a job's workflow. Its id is the job's id and its input is a JobSpec."""


class Update(StrEnum):
    """Asked of a job's workflow; answered when accepted or refused."""

    PREEMPT = "preempt"
    RESUME = "resume"
    CHECKPOINT = "checkpoint"
    MIGRATE = "migrate"
    RESIZE = "resize"
    CANCEL = "cancel"


class Signal(StrEnum):
    """Told to a job's workflow."""

    PLACEMENT = "placement"


class Query(StrEnum):
    """Read from a job's workflow."""

    SHOW = "show"
    EXPLAIN = "explain"


class SearchAttribute(StrEnum):
    """By which jobs are found; they change at transitions only."""

    TENANT = "ErgoTenant"
    TIER = "ErgoTier"
    PHASE = "ErgoPhase"
    EPOCH = "ErgoEpoch"
    WIDTH = "ErgoWidth"
    NODES = "ErgoNodes"


def node_task_queue(node: NodeId) -> str:
    """Task queue of the activities that are bound to a node, for this incarnation of it."""
    return f"node/{node}"
