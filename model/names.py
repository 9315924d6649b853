"""Names that belong to JobSpec v1: what a client of the workflow engine types. They stay what they are within v1."""

from __future__ import annotations

from enum import StrEnum

from model.ids import NodeId

JOB_WORKFLOW = "Job"
"""Type of a job's workflow. Its id is the job's id and its input is a JobSpec."""

CLUSTER_WORKFLOW = "ClusterScheduler"
"""Type of a cluster's scheduling workflow; its id is `cluster_workflow_id`."""

JOB_TASK_QUEUE = "ergo-jobs"
"""Where workflows of jobs are started, and where their control activities run."""

CLUSTER_TASK_QUEUE = "ergo-cluster"
"""Task queue of clusters' scheduling workflows and their activities, `notify` included."""


class Update(StrEnum):
    """Asked of a job's workflow; answered when accepted or refused."""

    PREEMPT = "preempt"
    RESUME = "resume"
    CHECKPOINT = "checkpoint"
    MIGRATE = "migrate"
    RESIZE = "resize"
    CANCEL = "cancel"


class Signal(StrEnum):
    """Told to a workflow: `PLACEMENT` and `SHARING` to a job's, `INBOX` to a cluster's, `RENEW` to any of ours."""

    PLACEMENT = "placement"
    INBOX = "inbox"
    RENEW = "renew"
    """Continue as new at the next moment when nothing is under way: an operator's tool, and a test's."""
    SHARING = "sharing"
    """What a node has seen go wrong among ranks that share a device."""


class Activity(StrEnum):
    """Types of activities, by where they run."""

    # On a node (`node_task_queue`), by model.runtime.
    ATTEND = "attend"
    BARRIER = "barrier"
    CHECKPOINT = "checkpoint"
    TRANSFER = "transfer"
    RESTORE = "restore"
    STOP = "stop"
    # Control of a job (`JOB_TASK_QUEUE`), by model.control.
    OPEN_JOB = "open_job"
    ALLOCATE_EPOCH = "allocate_epoch"
    ADVANCE_HEAD = "advance_head"
    PUBLISH = "publish_events"
    AWAIT_JOBS = "await_jobs"
    TURN = "turn"
    # Of a cluster (`CLUSTER_TASK_QUEUE`), by model.control.
    NOTIFY = "notify"
    DECIDE = "decide"
    DELIVER_PLAN = "deliver_plan"


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


def cluster_workflow_id(cluster: str) -> str:
    """Id of a cluster's scheduling workflow."""
    return f"cluster/{cluster}"
