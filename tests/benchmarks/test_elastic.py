"""The benchmarks of ranks that share a device: what they conclude, and that their job is the same at both widths."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.elastic import jobs, overhead, resize, verified
from benchmarks.harness import BenchmarkError, Condition
from benchmarks.machine import ROOT
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


class _Counted:
    """A side that was measured: CPU time of its windows, and what was counted meanwhile."""

    def __init__(self, cpu: list[float], shared: int, compared: int = 0, mismatches: int = 0) -> None:
        self.cpu = cpu
        self._found = {"shared": shared, "verified": compared, "mismatches": mismatches, "timeouts": 0}

    def counted(self) -> dict[str, int]:
        return self._found


def test_what_comparisons_cost_is_scaled_by_how_many_there_were() -> None:
    none = _Counted([1.0, 1.0], 3200)
    figure = verified.cost("elastic.x", none, _Counted([1.1, 1.3], 3100, 40), steps=20)
    assert figure.value == pytest.approx(20.0 * 32 / 1024)  # one of 32 was computed again, and took a fifth more
    assert not figure.holds
    assert figure.details["compared_per_step"] == 2.0


@pytest.mark.parametrize("other", [_Counted([1.0], 3200), _Counted([1.0], 3100, 40, mismatches=1)])
def test_where_nothing_was_compared_or_something_differed_there_is_no_cost(other: _Counted) -> None:
    with pytest.raises(BenchmarkError, match="Nothing was compared"):
        verified.cost("elastic.x", _Counted([1.0], 3200), other, steps=20)


def test_the_rate_that_costs_are_scaled_to_is_the_default() -> None:
    source = (ROOT / "proxy_runtime/device/native/splice/splicer.hpp").read_text()
    assert f"verify_one_of_ = {verified.RATE}," in source


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
