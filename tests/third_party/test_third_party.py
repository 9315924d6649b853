"""Every script of the table, against the table."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.third_party import running
from tests.third_party.cases import CASES, Case

_FILE = Path(__file__).parent / "results.json"
_RESULTS = json.loads(_FILE.read_text()) if _FILE.is_file() else {}  # written by `python -m tests.third_party`
# An environment with the packages of requirements/thirdparty.txt; `make third-party` makes it.
PYTHON = Path(os.environ.get("ERGO_THIRDPARTY_PYTHON", ".venv-thirdparty/bin/python")).absolute()


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment that `make third-party` makes")
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("case", [c for c in CASES if c.name in _RESULTS], ids=lambda case: case.name)
def test_it_runs_and_has_the_results_of_the_table(case: Case) -> None:
    outcome = running.run(case, str(PYTHON))
    assert outcome.result == _RESULTS[case.name]["result"], outcome.detail
