"""Fabric and engine under sanitizers: proxies as threads, random collectives, cuts, every result checked."""

from __future__ import annotations

import subprocess

import pytest

from tests.native.build import FABRIC_SOURCES, HERE, compile_native

SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_nothing_is_found_under(sanitizer: str) -> None:
    flags = ["-O1", "-g", *SANITIZERS[sanitizer]]
    program = compile_native("fabric_stress", [HERE / "fabric_stress.cpp", *FABRIC_SOURCES], flags)
    for proxies, rounds, seed in [(2, 300, 1), (4, 200, 2)]:
        done = subprocess.run(
            # setarch: the thread sanitizer cannot place its shadow under some kernels' address randomisation.
            ["setarch", "-R", str(program), str(proxies), str(rounds), str(seed)],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "ok\n"
