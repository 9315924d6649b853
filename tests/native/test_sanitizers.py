"""The native code that meets other processes, under sanitizers; `make sanitize` runs all.

What needs torch and decodes what others send is watched by itself too (test_fuzz.py). In the whole device module a
sanitizer watches our half only: containers that torch's own half has grown and frees are left out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy_runtime import build
from tests.native import device_module
from tests.native.build import HERE, RING_FLAGS, RING_SOURCES, SANITIZERS, compile_native, run_native
from tests.proxy_runtime.rank.launcher import SCRIPTS, Launcher


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


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the device module, built for the address and undefined-behaviour sanitizers."""
    folder = tmp_path_factory.mktemp("device")
    device_module.build(folder)
    assert b"__asan_report_load8" in (folder / "_ergo_device.so").read_bytes()
    return folder


@pytest.mark.slow
@pytest.mark.timeout(3000)  # built first, which takes minutes
@pytest.mark.parametrize(
    ("name", "ranks", "devices"),
    [("basics", 1, 1), ("elements", 1, 1), ("errors", 1, 1), ("recurrent", 1, 1), ("collectives", 3, 2)],
)
def test_the_device_module_serves_a_job(watched: Path, name: str, ranks: int, devices: int) -> None:
    """What it finds ends the device proxy, and with it the job."""
    launcher = Launcher(build.ensure().rank_dir, watched, deadline_s=600.0)
    launcher.proxy_environment = device_module.environment()
    for result in launcher.run(SCRIPTS / f"{name}.py", ranks=ranks, devices=devices):
        assert result.code == 0, result.err
