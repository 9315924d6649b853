"""A job's head: which run of its workflow speaks for it, which epoch counts, which checkpoint is the newest.

Epochs and generations only ever grow, over workflow resets, new workflows under the old id, and lost answers.
"""

from __future__ import annotations

from collections.abc import Callable

from model.control import (
    AdvanceHeadInput,
    AdvanceHeadResult,
    AllocateEpochInput,
    AllocateEpochResult,
    OpenJobInput,
    OpenJobResult,
)
from model.ids import CheckpointId, Epoch, Generation, JobId, NodeId, Step
from model.records import JobHead
from proxy_runtime.storage.blobs import Bucket
from proxy_runtime.storage.errors import Fenced
from proxy_runtime.storage.records import Records

_FORMER_RUNS = 64


class Heads:
    """The heads of a fleet's jobs."""

    def __init__(self, bucket: Bucket) -> None:
        self._records = Records(bucket, "records/jobs", JobHead)

    def read(self, job: str) -> JobHead | None:
        """A job's head; None before it was opened."""
        return self._records.read(job)

    def read_all(self) -> list[JobHead]:
        """The heads of all jobs that ever were, by name."""
        return list(self._records.read_all().values())

    def open_job(self, input: OpenJobInput) -> OpenJobResult:
        """Gives the generation to a run of the job's workflow, once. See `OpenJobInput`.

        A workflow that is new under the id takes it over: it has no checkpoint, and the parts of the one before are
        fenced at once.

        Raises:
            Fenced: the run held the generation before, and another one took it.
        """

        def change(head: JobHead | None) -> JobHead | None:
            if head is None:
                return JobHead(
                    job=input.job,
                    tenant=input.tenant,
                    first_execution_run=input.first_execution_run,
                    generation=Generation(1),
                    generation_run=input.workflow_run,
                )
            if head.generation_run == input.workflow_run:
                return None
            if input.workflow_run in head.former_runs:
                raise _not_holding(head, input.workflow_run)
            update: dict[str, object] = {
                "generation": head.generation.next,
                "generation_run": input.workflow_run,
                "former_runs": (*head.former_runs, head.generation_run)[-_FORMER_RUNS:],
            }
            if head.first_execution_run != input.first_execution_run:
                fence = head.allocated.next
                update |= {
                    "tenant": input.tenant,
                    "first_execution_run": input.first_execution_run,
                    "allocated": fence,
                    "epoch": fence,
                    "nodes": (),
                    "before": _left_behind(head),
                    "checkpoint": None,
                    "checkpoint_epoch": Epoch(0),
                    "step": Step(0),
                    "final": None,
                }
            return head.model_copy(update=update)

        head = self._records.update(input.job, change)
        return OpenJobResult(head.generation, head.epoch, head.nodes, head.checkpoint, head.step)

    def allocate_epoch(self, input: AllocateEpochInput) -> AllocateEpochResult:
        """Hands out an epoch that nobody has had.

        Raises:
            Fenced: another run holds the generation.
        """

        def change(head: JobHead) -> JobHead:
            _check_run(head, input.workflow_run)
            return head.model_copy(update={"allocated": head.allocated.next})

        return AllocateEpochResult(self._update(input.job, change).allocated)

    def advance_head(self, input: AdvanceHeadInput) -> AdvanceHeadResult:
        """Makes an epoch the one that counts; a call that is repeated returns the same.

        Raises:
            Fenced: a higher epoch counts, this one was never handed out or is elsewhere, or another run holds the
                generation.
        """

        def change(head: JobHead) -> JobHead | None:
            _check_run(head, input.workflow_run)
            if input.epoch == head.epoch and set(input.nodes) == set(head.nodes):
                return None
            if not head.epoch < input.epoch <= head.allocated:
                raise Fenced(
                    f"Epoch {input.epoch} of job {input.job} cannot be made the one that counts: epoch {head.epoch} "
                    f"counts, and {head.allocated} is the last that was handed out."
                )
            update = {"epoch": input.epoch, "nodes": input.nodes, "before": _left_behind(head)}
            return head.model_copy(update=update)

        return AdvanceHeadResult(self._update(input.job, change).before)

    def commit_checkpoint(self, job: str, epoch: Epoch, checkpoint: CheckpointId, step: Step) -> None:
        """Makes a checkpoint the newest of its job.

        Raises:
            Fenced: another epoch counts, or this one has committed a later checkpoint already.
        """

        def change(head: JobHead) -> JobHead | None:
            _check_epoch(head, epoch)
            if head.checkpoint == checkpoint:
                return None
            if head.checkpoint_epoch == epoch and step < head.step:
                raise Fenced(
                    f"Checkpoint {checkpoint[:15]} of job {job} at step {step} comes too late: one at step {head.step} "
                    "is committed."
                )
            return head.model_copy(update={"checkpoint": checkpoint, "checkpoint_epoch": epoch, "step": step})

        self._update(job, change)

    def commit_final(self, job: str, epoch: Epoch, checkpoint: CheckpointId) -> None:
        """Notes the checkpoint of the volume of a job that has ended.

        Raises:
            Fenced: another epoch counts.
        """

        def change(head: JobHead) -> JobHead | None:
            _check_epoch(head, epoch)
            return None if head.final == checkpoint else head.model_copy(update={"final": checkpoint})

        self._update(job, change)

    def let_go(self, job: str, generation_run: str) -> bool:
        """Forgets the newest checkpoint of a job that has ended, before it is removed: after a reset it begins anew.

        Returns:
            Whether it is forgotten: not where another run than `generation_run` holds the generation.
        """

        def change(head: JobHead) -> JobHead | None:
            if head.generation_run != generation_run or head.checkpoint is None:
                return None
            return head.model_copy(update={"checkpoint": None, "checkpoint_epoch": Epoch(0), "step": Step(0)})

        head = self._update(job, change)
        return head.generation_run == generation_run and head.checkpoint is None

    def holds_generation(self, job: str, workflow_run: str, generation: Generation) -> bool:
        """Whether a run may publish events of a generation."""
        head = self.read(job)
        return head is not None and (head.generation_run, head.generation) == (workflow_run, generation)

    def _update(self, job: str, change: Callable[[JobHead], JobHead | None]) -> JobHead:
        def checked(head: JobHead | None) -> JobHead | None:
            if head is None:
                raise Fenced(f"Job {JobId(job)} was never opened in this fleet's store.")
            return change(head)

        return self._records.update(job, checked)


def _left_behind(head: JobHead) -> tuple[NodeId, ...]:
    """Nodes that may have parts of the epoch that counts until now: after a takeover, those of the job before."""
    return head.nodes or head.before


def _check_run(head: JobHead, run: str) -> None:
    if head.generation_run != run:
        raise _not_holding(head, run)


def _check_epoch(head: JobHead, epoch: Epoch) -> None:
    if head.epoch != epoch:
        raise Fenced(f"Epoch {epoch} of job {head.job} may not commit: epoch {head.epoch} is the one that counts.")


def _not_holding(head: JobHead, run: str) -> Fenced:
    return Fenced(
        f"Run {run} of the workflow of job {head.job} may not act for it: run {head.generation_run} holds generation "
        f"{head.generation}."
    )
