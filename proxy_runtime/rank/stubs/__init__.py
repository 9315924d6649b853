"""Stub libraries: ELF files that stand in for the NVIDIA libraries of the installed torch wheel."""
