"""Runs the scheduler's policy, unchanged, on job traces: events instead of time, measured costs instead of devices.

`workload` says what arrives, `engine` lets it happen under one policy, `outcome` is what came of it, `measures` what is
reported of that. Nothing here knows of Temporal or of the live fleet.
"""
