"""Conditions, figures, pairing, selection and records of the benchmark harness; nothing is timed here."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.harness import BenchmarkError, Condition, Context, Figure, Paired, alternate, paired, select
from benchmarks.runs import Cut, Outcome, Report, StepTimes, parse_output, run_command
from benchmarks.runtime import cut_gaps_s, downtime_parts


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [("<= 1.1", 1.1, True), ("<= 1.1", 1.11, False), ("< 2", 2.0, False), (">= 3", 3.0, True), ("> 3", 3.0, False)],
)
def test_condition(text: str, value: float, holds: bool) -> None:
    condition = Condition.parse(text)
    assert condition.holds(value) is holds
    assert str(condition) == text


@pytest.mark.parametrize("text", ["1.1", "== 1", "<= x", ""])
def test_condition_refuses(text: str) -> None:
    with pytest.raises(ValueError):
        Condition.parse(text)


def test_line_of_a_figure() -> None:
    samples = [1.0, 2.0, 3.0, 4.0, 100.0]
    assert Figure("a.b_ms", "ms", samples, Condition("<=", 3)).line() == (
        "a.b_ms 3 ms must <= 3 holds  (1..100, quartiles 2..4, n=5)"
    )
    assert Figure("a.b", "MB", [5, 7], Condition("<", 7), value=7).line() == "a.b 7 MB must < 7 short  (5..7, n=2)"
    assert Figure("a.b.part", "s", [0.5]).line() == "a.b.part 0.5 s must - holds  (0.5..0.5, n=1)"
    with pytest.raises(BenchmarkError, match="no samples"):
        Figure("a.b", "ms", [])


def test_sides_take_turns_and_swap_the_lead() -> None:
    assert list(alternate(3)) == [(True, 0), (False, 0), (False, 1), (True, 1), (True, 2), (False, 2)]


def test_paired_ratio_survives_a_machine_that_slows_down() -> None:
    clock = iter([1.0, 2.0, 4.0, 2.0, 4.0, 8.0])  # A B, B A, A B; B costs twice A, the machine gets slower
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return next(clock)

    times = paired(lambda: side("a"), lambda: side("b"), 3)
    assert "".join(order) == "abbaab"
    assert times == Paired(a=(1.0, 2.0, 4.0), b=(2.0, 4.0, 8.0))
    assert times.ratios == (2.0, 2.0, 2.0)


def test_paired_refuses_nonsense() -> None:
    with pytest.raises(BenchmarkError, match="at least one pair"):
        paired(lambda: 1.0, lambda: 1.0, 0)
    with pytest.raises(BenchmarkError, match="not a duration"):
        paired(lambda: 1.0, lambda: float("nan"), 1)


def test_select() -> None:
    def nothing(_: Context) -> Iterator[Figure]:
        yield from ()

    registry = dict.fromkeys(["runtime.a_ms", "runtime.b", "fleet.a_ms"], nothing)
    assert list(select("", registry)) == list(registry)
    assert list(select("runtime", registry)) == ["runtime.a_ms", "runtime.b"]
    assert list(select("*.a_ms", registry)) == ["runtime.a_ms", "fleet.a_ms"]
    assert list(select("none", registry)) == []


def test_the_runtime_has_its_benchmarks() -> None:
    names = set(select("runtime"))
    assert {"runtime.stop_agree_ms", "runtime.downtime_s", "runtime.rank_rss_mb"} <= names
    assert {f"runtime.step_ratio.{name}" for name in ("char_gpt", "digits_cnn", "mlp_sgd")} <= names


def test_run_all_prints_records_and_goes_on_after_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scratch: list[Path] = []

    def good(context: Context) -> Iterator[Figure]:
        scratch.append(context.directory())
        yield Figure("t.good", "ms", [1.0], Condition("<", 2))

    def short(_: Context) -> Iterator[Figure]:
        yield Figure("t.short", "ms", [3.0], Condition("<", 2))

    def broken(_: Context) -> Iterator[Figure]:
        yield Figure("t.broken", "ms", [1.0])
        raise BenchmarkError("the device is on fire.")

    results = tmp_path / "results.jsonl"
    assert command.run_all({"t.good": good}, 1, results, "python -m benchmarks t") == 0
    assert command.run_all({"t.broken": broken, "t.good": good}, 1, results, "x") == 1
    assert command.run_all({"t.short": short}, 1, results, "x") == 1

    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == ["t.good", "t.broken", "t.good", "t.short"]
    assert "t.broken not measured: the device is on fire." in printed.err
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [record["holds"] for record in records] == [True, True, True, False]
    assert records[0]["command"] == "python -m benchmarks t"
    assert records[0]["machine"]["cores"] >= 1
    assert set(records[0]["versions"]) == {"python", "torch", "ergosphere"}
    assert str(Path.home()) not in results.read_text()
    assert not scratch[0].exists()


def test_wrong_usage_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["no-such-benchmark"])
    assert ended.value.code == 2
    assert "no benchmark's name matches" in capsys.readouterr().err


def test_parse_output_of_prefixed_and_mixed_lines() -> None:
    times = {"median": 2.0, "lower_quartile": 1.5, "upper_quartile": 3.0, "longest": [9.0, 3.0], "blocks": 4}
    digest = "0123456789abcdef" * 4
    output = (
        f"[rank1] rank 1 step ms {json.dumps(times)}\nstep 10 loss 1.0\n"
        f"[rank1] rank 1 losses sha256 {digest} weights sha256 {digest}\n"
        f"rank 0 losses sha256 {digest} weights sha256 {digest}\n"
    )
    outcome = parse_output(output, 2)
    assert outcome.digests == {0: (digest, digest), 1: (digest, digest)}
    assert outcome.times == {1: StepTimes(2.0, 1.5, 3.0, (9.0, 3.0), 4)}
    with pytest.raises(BenchmarkError, match=r"Ranks \[2\]"):
        parse_output(output, 3)


def test_report_of_ergo_run(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    cut = {"outcome": "moved", "error": "", "ms": {"stop": 1.5, "agree": 2, "downtime": 900}}
    path.write_text(json.dumps({"ranks": [0], "cuts": [cut], "exit_code": 0, "rss_mb": [200.5]}))
    report = Report.read(path)
    assert report == Report(cuts=(Cut("moved", "", {"stop": 1.5, "agree": 2.0, "downtime": 900.0}),), rss_mb=(200.5,))
    assert report.cuts[0].stop_agree_ms == 3.5
    path.write_text("{}")
    with pytest.raises(BenchmarkError, match="cannot be read"):
        Report.read(path)


def test_downtime_is_the_gap_that_the_script_saw() -> None:
    times = StepTimes(median=50, lower_quartile=49, upper_quartile=51, longest=(1550, 1050, 90, 60), blocks=100)
    assert cut_gaps_s(Outcome({}, {0: times}), cuts=2) == [1.5, 1.0]
    cuts = [Cut("moved", "", {"stop": 4, "agree": 6, "process": 300, "downtime": 1000})]
    assert {figure.name: figure.value for figure in downtime_parts(cuts)} == {
        "runtime.downtime_s.barrier": 0.01,
        "runtime.downtime_s.process": 0.3,
        "runtime.downtime_s.told": 1.0,
    }


def test_a_run_that_is_late_is_ended_with_all_it_started(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path('child').write_text(str(child.pid))\n"
        "print('started', flush=True)\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(BenchmarkError, match=r"(?s)not done after 3 s.*started"):
        run_command([sys.executable, str(script)], tmp_path, deadline_s=3)
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(child)


def test_a_run_that_fails_says_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"(?s)exit code 3: .*oh no"):
        run_command([sys.executable, "-c", "print('oh no'); raise SystemExit(3)"], tmp_path, deadline_s=60)


def _runs(pid: int) -> bool:
    """Whether a process is there and not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
