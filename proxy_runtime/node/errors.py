"""Errors of a node's runtime: the codes of `model.runtime.RuntimeCode`, which callers tell apart, and one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from model.ids import Epoch, JobId, NodeId
from model.runtime import FINAL_CODES, RuntimeCode
from proxy_runtime.checkpoint import errors as checkpoint
from proxy_runtime.errors import ErgoError


class NodeError(ErgoError):
    """A node cannot do what it was asked for."""

    code = "node"


def fenced(job: JobId, epoch: Epoch, known: Epoch) -> NodeError:
    """A higher epoch is known."""
    return NodeError(
        f"Epoch {epoch} of job {job} is out of date: epoch {known} counts.",
        code=RuntimeCode.FENCED,
        remedy="Nothing of it may go on; the job is where the higher epoch is.",
    )


def unknown(job: JobId, epoch: Epoch, node: NodeId) -> NodeError:
    """Nothing of this job and epoch is here."""
    return NodeError(
        f"Node {node} has nothing of job {job} in epoch {epoch}.",
        code=RuntimeCode.UNKNOWN,
        remedy="Go back to its newest checkpoint.",
    )


def unsuitable(message: str, remedy: str) -> NodeError:
    """This node cannot run or restore the job; another one may."""
    return NodeError(message, code=RuntimeCode.UNSUITABLE, remedy=remedy)


def deadline(message: str, remedy: str = "The job runs on as before; try again.") -> NodeError:
    """Time ran out."""
    return NodeError(message, code=RuntimeCode.DEADLINE, remedy=remedy)


def damaged(message: str) -> NodeError:
    """A checkpoint cannot be read as it was written."""
    return NodeError(message, code=RuntimeCode.DAMAGED, remedy="Go back to an earlier checkpoint.")


# What other parts say, by what it means for whoever asked the node.
_MEANINGS: dict[str, RuntimeCode] = {
    "run.shim-gone": RuntimeCode.UNKNOWN,
    "run.ended": RuntimeCode.UNKNOWN,
    "run.lost": RuntimeCode.UNKNOWN,
    "run.bad-spec": RuntimeCode.UNSUITABLE,
    "run.bad-operation": RuntimeCode.UNSUITABLE,  # of a shim from before this agent, which cannot do it
    "run.bad-width": RuntimeCode.UNSUITABLE,
    "run.deadline": RuntimeCode.DEADLINE,
    "cut.deadline": RuntimeCode.DEADLINE,
    "device-proxy.deadline": RuntimeCode.DEADLINE,
    "build.unknown": RuntimeCode.UNSUITABLE,
    "build.damaged": RuntimeCode.UNSUITABLE,
    checkpoint.DAMAGED: RuntimeCode.DAMAGED,
    checkpoint.MISSING: RuntimeCode.DAMAGED,
    checkpoint.FENCED: RuntimeCode.FENCED,
    checkpoint.OTHER_BUILD: RuntimeCode.UNSUITABLE,
    checkpoint.OTHER_CLASS: RuntimeCode.UNSUITABLE,
    checkpoint.NEWER_FORMAT: RuntimeCode.UNSUITABLE,
    checkpoint.IN_USE: RuntimeCode.UNSUITABLE,
}


def of_one_alone(error: ErgoError) -> ErgoError:
    """What has ended a part that others had met: one made anew would wait for them in vain and is not tried."""
    if error.code in _MEANINGS or error.code in FINAL_CODES:
        return error
    return NodeError(error.message, code=RuntimeCode.UNKNOWN, remedy=error.remedy)


@contextmanager
def translated() -> Iterator[None]:
    """Gives errors of the parts below the codes that callers tell apart; their sentences stay."""
    try:
        yield
    except ErgoError as error:
        meaning = _MEANINGS.get(error.code)
        if meaning is None:
            raise
        raise NodeError(error.message, code=meaning, remedy=error.remedy) from error
