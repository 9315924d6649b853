"""The verified mode: what would have been shared is computed by every rank and compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from proxy_runtime.device.client import NativeBuild, Zygote
from tests.proxy_runtime.device.splice.programs import together
from tests.proxy_runtime.device.splice.test_sharing import N, counters, step


@pytest.fixture(scope="module")
def zygote(device_build: NativeBuild, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    before = os.environ.get("ERGO_SPLICE_VERIFY")
    os.environ["ERGO_SPLICE_VERIFY"] = "1"
    try:
        with Zygote.start(device_build, "cpu", log=tmp_path_factory.mktemp("zygote") / "log") as started:
            yield started
    finally:
        if before is None:
            del os.environ["ERGO_SPLICE_VERIFY"]
        else:
            os.environ["ERGO_SPLICE_VERIFY"] = before


def test_every_result_is_compared_and_then_shared(job: Callable[..., Any]) -> None:
    alone = together(job([0, 1]).ranks, step)
    running = job([0, 0])
    assert together(running.ranks, step) == alone
    counted = counters(running)
    assert counted["verified"] >= 9
    assert counted["mismatches"] == 0
    assert counted["executed"] == 18
    assert counted["physical_bytes"] == 2 * 4 * N
    assert counted["copies"] == 0  # those of the comparison are not the job's
