"""Deterministic state machines as Temporal workflows: job, cluster, region and fleet.

Nothing is here yet. It will do no input or output, and may import `model`, `scheduling` and the types of `events`.
"""
