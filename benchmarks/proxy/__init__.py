"""The device proxy against the native device: dispatch, steps, copies, start, memory, instructions."""

from benchmarks.proxy import copies, fuzz, instructions, process, small_ops, steps

__all__ = ["copies", "fuzz", "instructions", "process", "small_ops", "steps"]
