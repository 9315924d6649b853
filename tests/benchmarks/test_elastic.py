"""The benchmarks of ranks that share a device: what they conclude, and that their job is the same at both widths."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.elastic import jobs, overhead, resize
from benchmarks.harness import BenchmarkError, Condition
from benchmarks.proxy import sides
from proxy_runtime.shim.spec import CutReport


def test_overhead_is_in_percent_beyond_its_neighbour() -> None:
    figure = overhead.beyond("elastic.x", [2.0, 1.02, 3.0], [2.0, 1.0, 2.0], Condition("<=", 3))
    assert figure.value == pytest.approx(2.0)
    assert figure.holds
    assert figure.details["other_s"] == 2.0


def test_a_gap_belongs_to_the_resize_that_took_as_long() -> None:
    reports = [CutReport(ms={"downtime": each}) for each in (900.0, 1500.0, 700.0)]
    timing = {"median": 100.0, "longest": [1700.0, 1100.0, 900.0, 110.0]}
    assert [gap for gap, _ in resize.assigned(timing, reports)] == pytest.approx([1.0, 1.6, 0.8])


def test_a_script_that_saw_no_gap_is_no_measurement() -> None:
    with pytest.raises(BenchmarkError, match=r"the runtime tells 0\.90 s"):
        resize.assigned({"median": 100.0, "longest": [200.0]}, [CutReport(ms={"downtime": 900.0})])


def test_jobs_whose_optimizer_weighs_must_save_time() -> None:
    assert {name for name, job in jobs.OVERHEAD.items() if job.weighs} >= {"gpt_256_adamw_foreach", "mlp_adamw_foreach"}
    assert set(jobs.BYTES) | set(jobs.PEAK) <= set(jobs.OVERHEAD)


@pytest.mark.slow
def test_ranks_are_the_same_on_one_device_and_on_two(tmp_path: Path) -> None:
    digests = []
    for devices in (1, 2):
        scratch = tmp_path / str(devices)
        scratch.mkdir()
        with sides.proxied(jobs.SCRIPT, scratch=scratch, ranks=2, devices=devices) as side:
            assert len(side.proxies) == devices
            for name in ("gpt_64_bf16", "cnn_adamw_foreach"):
                side.ask("make", **jobs.OVERHEAD[name].fields)
                side.ask("window", steps=2)
                digests.append([answer["digest"] for answer in side.ask("digest")])
            sizes = side.ask("sizes")[0]
            assert sizes["model"] == pytest.approx(3 * sizes["gradients"], rel=0.01)  # two moments
            side.ask("release", statistics=False)
            assert side.ask("sizes")[0]["model"] == 0
    assert digests[:2] == digests[2:]
