"""The harness itself: it must see what it is for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.operators import driver, expected, outcome
from tests.operators.expected import Expected
from tests.operators.outcome import Finding, Outcome
from tests.operators.selection import Selection
from tests.proxy_runtime.rank.launcher import Launcher

ADD = ("op", "add", "float32")


def ran(*findings: Finding, cap: int = 0, extended: bool = True) -> Outcome:
    return Outcome(Selection(cap=cap, extended=extended), {ADD: {"forward": 3}}, list(findings))


def test_what_is_new_and_what_is_gone_are_differences() -> None:
    finding = Finding(*ADD, "forward", "wrong", 2, "1 of 4 differ")
    entry = Expected(*ADD, "forward", "wrong", 2, "because")
    assert expected.compare([entry], ran(finding)) == []
    assert expected.compare([], ran(finding))[0].startswith("new: op add float32 forward wrong")
    assert expected.compare([entry], ran())[0].startswith("gone: op add float32 forward wrong")


@pytest.mark.parametrize(
    ("entry", "cap", "extended"),
    [
        (Expected(*ADD, "forward", "wrong", 5, "a later sample"), 3, True),
        (Expected(*ADD, "errors", "no_error", 0, "a phase that was not run"), 0, False),
        (Expected("op", "mul", "float32", "forward", "wrong", 0, "an entry that was not run"), 0, True),
    ],
)
def test_what_was_not_run_is_not_gone(entry: Expected, cap: int, extended: bool) -> None:
    assert expected.compare([entry], ran(cap=cap, extended=extended)) == []


def test_an_update_keeps_reasons_and_what_was_not_run(tmp_path: Path) -> None:
    path = tmp_path / "list.tsv"
    other = "op\tmul\tfloat32\tforward\twrong\t0\tnot run"
    path.write_text(f"op\tadd\tfloat32\tforward\twrong\t2\twhy\nop\tadd\tfloat32\thit\twrong\t2\twhy\n{other}\n")
    again = Finding(*ADD, "backward", "wrong", 1, "")
    new = Finding(*ADD, "out", "strides", 1, "")
    expected.update(ran(Finding(*ADD, "forward", "wrong", 3, ""), again, new), path)
    assert {(entry.name, entry.phase, entry.kind): entry.reason for entry in expected.load(path)} == {
        ("add", "forward", "wrong"): "why",
        ("add", "backward", "wrong"): "why",  # of the same entry and kind
        ("add", "out", "strides"): expected.UNEXPLAINED,
        ("mul", "forward", "wrong"): "not run",
    }


_WORKER = """
import json, os, pathlib, sys, time
results, progress = pathlib.Path(sys.argv[2]), sys.argv[3]
done = results.read_text() if results.exists() else ""
for task in ("op a float32", "op b float32", "op c float32"):
    if task in done:
        continue
    pathlib.Path(progress).write_text("1\\t" + task + "\\tforward\\t4\\n")
    if "b" in task:
        {end}
    with results.open("a") as out:
        out.write(json.dumps(dict(task=task, counts=dict(forward=1), failures=[], cpu_errors=0)) + "\\n")
"""


@pytest.mark.parametrize(
    ("end", "kind"),
    [("os.abort()", "rank crash"), ("time.sleep(1000)", "hang"), ("os._exit(9)", "poison")],
)
def test_a_worker_that_ends_is_started_anew_behind_the_entry(
    end: str, kind: str, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(_WORKER.format(end=end))
    monkeypatch.setattr(driver, "WORKER", worker)
    results = tmp_path / "results.jsonl"
    driver.run(launcher, Selection(), results, silence_s=1.0, log=lambda line: None)
    records = {r["task"]: r["failures"] for r in map(json.loads, results.read_text().splitlines())}
    assert [task for task, failures in records.items() if not failures] == ["op a float32", "op c float32"]
    (failure,) = records["op b float32"]
    assert failure[:3] == ["forward", kind, 4]
    assert outcome.read(results, Selection()).findings[0].kind == kind
