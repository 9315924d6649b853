"""The device proxy against the native device: all-reduce, dispatch, steps, copies, start, memory, instructions."""

from benchmarks.proxy import allreduce, copies, fuzz, instructions, process, small_ops, steps

__all__ = ["allreduce", "copies", "fuzz", "instructions", "process", "small_ops", "steps"]
