"""The runtime's benchmarks over runs that are made up: what they conclude, not how fast anything is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runs, runtime
from benchmarks.harness import BenchmarkError, Context, Figure, select
from benchmarks.runs import Cut, Outcome, Report, StepTimes

SAME = {0: ("a" * 64, "b" * 64)}
PARTS = {"stop": 3.0, "agree": 4.0, "process": 200.0, "downtime": 900.0}


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(repeat=2, scratch=tmp_path, say=lambda _: None)


def outcome(median: float, *, longest: tuple[float, ...] = (), digests: Any = SAME) -> Outcome:
    return Outcome(digests, {0: StepTimes(median, median, median, longest, blocks=9)})


def measure(name: str, context: Context) -> dict[str, Figure]:
    return {figure.name: figure for figure in select(name)[name](context)}


def fake(monkeypatch: pytest.MonkeyPatch, native: Outcome | None, proxied: Outcome, report: Report) -> None:
    monkeypatch.setattr(runtime, "run_native", lambda *_, **__: native)
    monkeypatch.setattr(runtime, "run_ergo", lambda *_, **__: (proxied, report))


@pytest.mark.parametrize(("proxied", "holds"), [(10.5, True), (11.5, False)])
def test_step_ratio(monkeypatch: pytest.MonkeyPatch, context: Context, proxied: float, holds: bool) -> None:
    fake(monkeypatch, outcome(10.0), outcome(proxied), Report((), ()))
    figure = measure("runtime.step_ratio.mlp_sgd", context)["runtime.step_ratio.mlp_sgd"]
    assert figure.value == proxied / 10
    assert figure.holds is holds
    assert figure.details == {"native_ms": (10.0, 10.0), "proxied_ms": (proxied, proxied)}


def test_step_ratio_compares_only_equal_work(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    fake(monkeypatch, outcome(10.0), outcome(5.0, digests={0: ("c" * 64, "b" * 64)}), Report((), ()))
    with pytest.raises(BenchmarkError, match="different losses or weights") as caught:
        measure("runtime.step_ratio.mlp_sgd", context)
    assert caught.value.code == "benchmark.different-bits"


def test_downtime_and_its_parts(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    report = Report((Cut("moved", "", PARTS),) * 6, ())
    fake(monkeypatch, None, outcome(50.0, longest=(1050.0,) * 6 + (60.0,)), report)
    figures = measure("runtime.downtime_s", context)
    assert figures["runtime.downtime_s"].value == 1.0
    assert figures["runtime.downtime_s"].holds
    assert figures["runtime.downtime_s.barrier"].value == pytest.approx(0.007)
    assert figures["runtime.downtime_s.told"].value == 0.9


def test_downtime_hidden_from_the_script_is_no_downtime(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    fake(monkeypatch, None, outcome(50.0, longest=(100.0,) * 9), Report((Cut("moved", "", PARTS),) * 6, ()))
    with pytest.raises(BenchmarkError, match="clock saw gaps"):
        measure("runtime.downtime_s", context)


def test_cuts_called_off_or_too_few_are_no_measurement(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    good, bad = Cut("checkpointed", "", PARTS), Cut("called-off", "no space", PARTS)
    fake(monkeypatch, None, outcome(1.0), Report((good,) * 9 + (bad,), ()))
    with pytest.raises(BenchmarkError, match="1 of 10 cuts were called off, the first because: no space"):
        measure("runtime.stop_agree_ms", context)
    fake(monkeypatch, None, outcome(1.0), Report((good,) * 2, ()))
    with pytest.raises(BenchmarkError, match="Only 2 cuts"):
        measure("runtime.stop_agree_ms", context)
    fake(monkeypatch, None, outcome(1.0), Report((good,) * 9 + (Cut("job-ended", "", {}),), ()))
    figures = measure("runtime.stop_agree_ms", context)
    assert {name: (figure.value, len(figure.samples)) for name, figure in figures.items()} == {
        f"runtime.stop_agree_ms.{ranks}": (7.0, 9) for ranks in (1, 2, 4)
    }


def test_memory_is_that_of_the_largest_rank(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    fake(monkeypatch, None, outcome(1.0), Report((), (250.0, 290.0)))
    figure = measure("runtime.rank_rss_mb", context)["runtime.rank_rss_mb"]
    assert (figure.value, figure.holds) == (290.0, False)


def test_command_line_of_ergo_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in = tmp_path / "ergo.py"
    stand_in.write_text(
        "import json, os, sys\n"
        "arguments = sys.argv[1:]\n"
        "assert 'PYTHONPATH' not in os.environ and os.environ['OMP_NUM_THREADS'] == '1'\n"
        "assert os.path.isfile(arguments[arguments.index('60ms') + 1]), arguments\n"
        "with open(arguments[arguments.index('--json-report') + 1], 'w') as file:\n"
        "    json.dump({'cuts': [], 'rss_mb': [1.0, 2.0]}, file)\n"
        "for rank in range(int(arguments[arguments.index('--nproc') + 1])):\n"
        "    print(f'[rank{rank}] rank {rank} losses sha256 ' + 'a' * 64 + ' weights sha256 ' + 'b' * 64)\n"
    )
    monkeypatch.setattr(runs, "ergo_command", lambda: [sys.executable, str(stand_in)])
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    told, report = runs.run_ergo(
        "examples/mlp_sgd.py", ["--steps", "3"], ranks=2, cwd=tmp_path, options=["--cut-every", "60ms"]
    )
    assert set(told.digests) == {0, 1}
    assert report.rss_mb == (1.0, 2.0)
