"""The native code that meets other processes, under sanitizers; `make sanitize` runs all.

What needs torch is watched as far as it decodes what others send (test_fuzz.py). The rest of the device module runs
operators: a sanitizer would watch our half of every container that torch's own, unwatched half grows and frees.
"""

from __future__ import annotations

import pytest

from tests.native.build import HERE, RING_FLAGS, RING_SOURCES, SANITIZERS, compile_native, run_native


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_both_ends_of_a_ring(sanitizer: str) -> None:
    """Threads, handlers of signals that use the device or raise, a full ring, messages of every size."""
    flags = ["-O1", "-g", *RING_FLAGS, *SANITIZERS[sanitizer]]
    program = compile_native("ring_stress", [HERE / "ring_stress.cpp", *RING_SOURCES], flags)
    for seed in ("1", "2"):
        run_native(program, "5", seed)


def test_both_ends_of_a_ring_without_a_sanitizer() -> None:
    program = compile_native("ring_stress", [HERE / "ring_stress.cpp", *RING_SOURCES], ["-O1", *RING_FLAGS])
    run_native(program, "2", "3")
