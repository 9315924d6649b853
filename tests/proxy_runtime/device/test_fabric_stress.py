"""Fabric and engine under sanitizers: proxies as threads, random collectives, cuts, every result checked."""

from __future__ import annotations

import pytest

from tests.native.build import FABRIC_SOURCES, HERE, SANITIZERS, compile_native, run_native


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_nothing_is_found_under(sanitizer: str) -> None:
    flags = ["-O1", "-g", *SANITIZERS[sanitizer]]
    program = compile_native("fabric_stress", [HERE / "fabric_stress.cpp", *FABRIC_SOURCES], flags)
    for proxies, rounds, seed in [(2, 300, 1), (4, 200, 2)]:
        run_native(program, str(proxies), str(rounds), str(seed))
