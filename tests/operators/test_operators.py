"""A part of PyTorch's tables on the device, against the checked-in list; `python -m tests.operators` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operators import document, driver, expected, outcome
from tests.operators.selection import Selection
from tests.proxy_runtime.rank.launcher import Launcher

# About a minute of CPU time together, on a quiet machine.
_PARTS = {
    "operators": Selection(("op",), ("bfloat16", "int64", "bool", "complex64"), cap=2),
    "all phases": Selection(("op",), ("float32",), cap=2, extended=True),
    "others": Selection(("foreach", "module", "optim"), ("float32",), cap=3),
}
_LEAST = {"operators": 10000, "all phases": 9000, "others": 500}


@pytest.mark.parametrize("part", _PARTS)
def test_results_are_those_of_the_list(part: str, launcher: Launcher, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    driver.run(launcher, _PARTS[part], results)
    found = outcome.read(results, _PARTS[part])
    assert expected.compare(expected.load(), found) == [], found.summary()
    assert sum(sum(counts.values()) for counts in found.tasks.values()) > _LEAST[part]


def test_every_line_of_the_list_has_a_reason() -> None:
    assert [entry.key for entry in expected.load() if entry.reason == expected.UNEXPLAINED] == []


def test_few_entries_differ() -> None:
    """At most twelve run another kernel by design, at most 1 % are refused; none is wrong or launches in the rank.

    An entry counts as refused if any sample in any layout, dtype and phase is.
    """
    entries = expected.load()
    assert len({e[:2] for e in entries if e.kind == document.REFUSED}) <= document.number_of_entries() / 100
    assert len({e[:2] for e in entries if e.kind == document.OTHER_KERNEL}) <= 12
    assert {
        e.key
        for e in entries
        if e.kind in ("wrong", "rank crash", "proxy crash", "hang", "poison", "launch", "harness")
    } == set()


def test_the_document_is_current() -> None:
    assert document.DOCUMENT.read_text() == document.text(), "run: python -m tests.operators --docs"
