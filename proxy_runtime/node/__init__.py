"""A node of a fleet: its part of every job, as the six calls of `model.runtime`, and what other nodes ask of it.

Nothing here knows of workflows or of message brokers: activities hand requests to a `LocalNodeRuntime`.
"""
