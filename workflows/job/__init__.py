"""The workflow of a job: one per job, for its whole life."""

from workflows.job.workflow import JobWorkflow

__all__ = ["JobWorkflow"]
