"""Runs every script of other people's libraries, and writes the table in the documentation.

    python -m tests.third_party --python PYTHON [--only NAME]

PYTHON has the packages of requirements/thirdparty.txt; `make third-party` makes an environment with them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from tests.third_party import running
from tests.third_party.cases import CASES, Case

_HERE = Path(__file__).parent
RESULTS = _HERE / "results.json"
_PAGE = _HERE.parent.parent / "docs" / "third-party.md"
_HEAD = """# Code that nobody here wrote

Scripts in `tests/third_party/scripts/`, written as the libraries' own examples are, with random weights and generated
data. Each runs unmodified under `ergo run --python`, and natively on the device that the proxy computes on (the CPU);
*equal* means that every loss, every printed result and the final weights are the same to the last bit. Where a model
draws random numbers on the device, the native run gets a second generator for them, as a CUDA device has (`native.py`).

`make third-party` makes an environment for them in `.venv-thirdparty` (the packages of `requirements/thirdparty.txt`,
beside those of `.venv`), runs the scripts and writes this page; `make third-party ONLY=timm` runs some of them, and
`python -m tests.third_party --python PYTHON` all with an environment of yours.
The hash is the beginning of the sha256 of what the script prints of its numbers.

| script | library | version | result | sha256 | why |
|---|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.third_party", description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="interpreter with requirements/thirdparty.txt")
    parser.add_argument("--only", default="", help="scripts whose name holds this; default: all")
    options = parser.parse_args()
    results: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    bad = 0
    for case in CASES:
        if options.only not in case.name:
            continue
        outcome = running.run(case, options.python)
        print(f"{case.name}: {outcome.result} {outcome.digest[:12]} {outcome.detail}", flush=True)
        bad += outcome.result != ("other numbers" if case.reason else "equal")
        results[case.name] = {
            "version": _version(options.python, case.library), "result": outcome.result,
            "sha256": outcome.digest, "detail": outcome.detail,
        }  # fmt: skip
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    _PAGE.write_text(_HEAD + "".join(_row(case, results[case.name]) for case in CASES if case.name in results))
    return 1 if bad else 0


def _row(case: Case, result: dict[str, str]) -> str:
    why = case.reason or result["detail"].replace("|", "/")
    cells = (f"`{case.name}`", case.library, result["version"], result["result"], f"`{result['sha256'][:12]}`", why)
    return "| " + " | ".join(cells) + " |\n"


def _version(python: str, library: str) -> str:
    program = f"from importlib.metadata import version; print(version({library!r}))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


raise SystemExit(main())
