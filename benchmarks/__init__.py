"""Measurements of Ergosphere against what it promises: ``python -m benchmarks [PATTERN]``."""
