"""Pure policy: state, events and the time in, a plan with reasons out; SLA accounting; the simulator.

Nothing is here yet. It may import `model` only.
"""
