"""The torch-free native code under the address, undefined-behaviour and thread sanitizers; `make sanitize` runs all."""

from __future__ import annotations

import subprocess

import pytest

from tests.native.build import HERE, RING_FLAGS, RING_SOURCES, compile_native

SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}


def run(program: str, *arguments: str) -> None:
    done = subprocess.run(
        # setarch: the thread sanitizer cannot place its shadow under some kernels' address randomisation.
        ["setarch", "-R", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n"


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_both_ends_of_a_ring(sanitizer: str) -> None:
    """Threads, handlers of signals that use the device or raise, a full ring, messages of every size."""
    flags = ["-O1", "-g", *RING_FLAGS, *SANITIZERS[sanitizer]]
    program = compile_native("ring_stress", [HERE / "ring_stress.cpp", *RING_SOURCES], flags)
    for seed in ("1", "2"):
        run(str(program), "5", seed)


def test_both_ends_of_a_ring_without_a_sanitizer() -> None:
    program = compile_native("ring_stress", [HERE / "ring_stress.cpp", *RING_SOURCES], ["-O1", *RING_FLAGS])
    run(str(program), "2", "3")
